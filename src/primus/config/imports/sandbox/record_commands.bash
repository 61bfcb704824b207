# Read by each bash of the sandbox before its script (BASH_ENV): commands from outside are recorded, not run, and what
# they would print or return is an answer that the importer chose (`answers`). The recorder's names begin with __primus.

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || exit 99 # `local -`
source /.primus/answers # __primus_mode, _answers[COMMAND], _job, _programs, _bash and _step
declare -i __primus_count=0 __primus_sleeps=0

# Write the line, the folder and the words of a command to a file of its own.
__primus_record() {
    local -i frame=1
    while [[ ${BASH_SOURCE[frame]-} == /.primus/* ]]; do frame+=1; done
    __primus_count+=1
    printf '%s\0' "${BASH_LINENO[frame - 1]}" "$PWD" "$@" >"/.primus/records/$BASHPID.$__primus_count"
}

# Print and return what the importer chose for a command.
__primus_answer() {
    local key="$*" each
    case ${__primus_answers[$key]-$__primus_mode} in
        lines) printf '%s\n' 0 1 2 3 4 5 6 7 ;;
        large) printf '%d\n' $((64 + ${#key})) ;;
        none) return 1 ;;
        token) # names the command: the first 40 letters in hexadecimal
            printf 'primus_fact_'
            for ((each = 0; each < ${#key} && each < 40; each += 1)); do printf %02x "'${key:each:1}"; done
            printf '_\n'
            ;;
        *) printf '%s\n' "${__primus_answers[$key]-$__primus_mode}" ;;
    esac
}

__primus_run() {
    local -
    set +x
    __primus_record "$@"
    __primus_answer "$@"
}

command_not_found_handle() { __primus_run "$@"; }

# A command that may start a shell script or a command line: that runs, too.
__primus_launch() {
    local -
    set +x
    __primus_record "$@"
    local -i at
    local word
    for ((at = 2; at <= $#; at += 1)); do
        word=${!at}
        case $word in
            --wrap=* | --command=*) __primus_start bash -c "${word#*=}" && return ;;
            --wrap | --command) __primus_start bash -c "${@:at+1:1}" && return ;;
            --export=*)
                local -a pairs
                IFS=, read -ra pairs <<<"${word#*=}"
                for word in "${pairs[@]}"; do [[ $word != [A-Za-z_]*=* ]] || local -x "$word"; done
                ;;
            [A-Za-z_]*=*) [[ $1 != env && $1 != sudo ]] || local -x "$word" ;;
            -*) ;;
            bash | sh | zsh | dash | */bash | */sh | */zsh | */dash) __primus_start bash "${@:at+1}" && return ;;
            *.sh | *.bash | *.slurm | *.sbatch | *.job | *.qsub) __primus_start bash "${@:at}" && return ;;
            *.py | python* | */python*) break ;;
            *)
                if [[ -f $word && -x $word ]]; then
                    __primus_start bash "${@:at}"
                    return
                fi
                ;;
        esac
    done
    if [[ ${1##*/} == @(ssh|pdsh|clush) && ${*: -1} == *' '* ]]; then
        __primus_start bash -c "${*: -1}" && return
    elif [[ ${1##*/} == @(sbatch|qsub|bsub|msub) && (-p /dev/stdin || -s /dev/stdin) ]]; then
        __primus_start bash -s && return
    fi
    __primus_answer "$@"
}

# A bash of its own; in a job, the variables of a job are set.
__primus_start() {
    local variable name
    ((SHLVL < 12)) || return 1
    if [[ ${FUNCNAME[2]-} == @(srun|sbatch|salloc|qsub|bsub|msub|mpirun|mpiexec*) ]]; then
        for variable in "${__primus_job[@]}"; do
            name=${variable%%=*}
            [[ -n ${!name-} ]] || local -x "$variable"
        done
    fi
    "$@" || true
}

for __primus_name in srun sbatch salloc qsub bsub msub mpirun mpiexec mpiexec.hydra torchrun nohup setsid env sudo \
    timeout numactl taskset nice ionice stdbuf ssh pdsh clush docker podman nerdctl singularity apptainer enroot \
    accelerate deepspeed kubectl gcloud conda mamba micromamba uv parallel xargs nsys rocprof rocprofv3 flock script xpk; do
    eval "$__primus_name() { __primus_launch $__primus_name \"\$@\"; }"
done

# Another bash reads this file first, too; a login shell would read files that are not here.
bash() {
    local -
    set +x
    local -a options=()
    local flags
    while [[ ${1-} == -?* ]]; do
        flags=${1//[li]/}
        shift
        case $flags in
            --) break ;;
            --* | -) ;;
            -o | -O) options+=("$flags" "$1") && shift ;;
            -*c*)
                [[ $flags == -c ]] || options+=("${flags/c/}")
                options+=(-c)
                [[ ${1-} != exec\ * ]] || set -- "__primus_exec ${1#exec }" "${@:2}"
                break
                ;;
            *) options+=("$flags") ;;
        esac
    done
    BASH_ENV=/.primus/record_commands.bash builtin command "$__primus_bash" "${options[@]}" "$@"
}
for __primus_name in sh zsh dash ksh; do
    eval "$__primus_name() { bash \"\$@\"; }"
    eval "function /bin/$__primus_name { bash \"\$@\"; }"
    eval "function /usr/bin/$__primus_name { bash \"\$@\"; }"
done
function /bin/bash { bash "$@"; }
function /usr/bin/bash { bash "$@"; }
function /usr/bin/env { env "$@"; }

# `exec COMMAND` of a script: the command runs as any other, and then the shell ends.
__primus_exec() {
    "$@"
    exit
}

# `command -v` asks what the machine has; `command NAME` runs NAME.
command() {
    case ${1-} in
        -v | -V)
            if [[ $(builtin type -t "${2-}") == @(builtin|keyword|file) ]]; then
                builtin command "$@"
            else
                __primus_run command "$@"
            fi
            ;;
        -p) "${@:2}" ;;
        *) if [[ $(builtin type -t "${1-}") == builtin ]]; then builtin "$@"; else "$@"; fi ;;
    esac
}
which() { command -v "$@"; }

# A loop that waits for something waits forever here.
sleep() { (((__primus_sleeps += 1) < 50)) || exit 1; }

# The text tools are the machine's own. What a tool prints of an answer, or of a file that is not here, is an answer.
__primus_tool() {
    local -
    set +x
    local key="$*" errors=/.primus/errors.$BASHPID input status
    if [[ ${__primus_answers[$key]+set} ]]; then
        [[ ! -p /dev/stdin ]] || builtin command cat >/dev/null
        __primus_run "$@"
        return
    fi
    if [[ $__primus_mode == token && $key == *primus_fact_* ]]; then
        __primus_run "$@"
        return
    elif [[ $__primus_mode == token && -p /dev/stdin ]]; then
        input=$(builtin command cat; printf x)
        if [[ $input == *primus_fact_* ]]; then
            __primus_run "$@"
            return
        fi
        printf %s "${input%x}" | builtin command "$@" 2>"$errors"
    else
        builtin command "$@" 2>"$errors"
    fi
    status=$?
    if [[ $(<"$errors") == *'No such file'* ]]; then
        __primus_run "$@"
        return
    fi
    return $status
}
for __primus_name in awk bc cat cut expr grep egrep gawk head paste rev sed seq sort tail tr uniq wc; do
    eval "$__primus_name() { __primus_tool $__primus_name \"\$@\"; }"
done

# A command by its path: a script that is here runs, anything else is recorded.
__primus_path() {
    if [[ -s $1 ]]; then bash "$@"; else __primus_run "$@"; fi
}
for __primus_name in "${__primus_programs[@]}"; do
    eval "function $__primus_name { __primus_path $__primus_name \"\$@\"; }"
done

PS4=$'+\x01${BASH_SOURCE-}\x01${LINENO}\x01${PWD}\x01 '
builtin exec {BASH_XTRACEFD}>>/.primus/trace
trap "$__primus_step" DEBUG # before each command: also after `set +x`
set -x
