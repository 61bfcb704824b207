# Variables of the launch scripts of AMD-AGI/Primus, translated to words of primus-cli. Sourced by run_*_pretrain.sh.
#
# PRIMUS_DRY_RUN=1 prints what would run, and runs nothing. Further arguments of a script are overrides of the experiment.
# Names as in examples/run_*_pretrain.sh of AMD-AGI/Primus. The scripts write to standard error, and echo no value of a
# secret: HF_TOKEN, WANDB_API_KEY and others reach the processes as variables.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DEFAULT_IMAGE=rocm/primus:v26.5

note() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
}

fail() {
    note "$1"
    [[ -z ${2-} ]] || printf '  %s\n' "$2" >&2
    exit 2
}

# Variables without a counterpart: NAME, and what primus-cli does instead.
WITHOUT_COUNTERPART=(
    "TRAIN_LOG=the logs of all ranks are in the run folder (primus-cli direct -- runs show)"
    "LOG_DIR=the logs of all ranks are in the run folder; --output=FILE of srun writes the terminal's"
    "CPUS_PER_TASK=add --cpus-per-task to primus-cli slurm srun"
    "USING_AINIC=network adapters are detected (primus-cli direct -- env show)"
    "USING_UEP=no counterpart"
    "REBUILD_UEP=nothing is built at launch; build it into the image"
    "REBUILD_PRIMUS_TURBO=nothing is built at launch; build it into the image"
    "REBUILD_BNXT=nothing is built at launch; build it into the image"
    "PATH_TO_BNXT_TAR_PACKAGE=nothing is built at launch; build it into the image"
    "PATCH_TE_FLASH_ATTN=upstream packages are patched by primus-cli direct --patch FILE (docs/patches.md)"
    "PRIMUS_SKIP_PIP=nothing is installed at launch"
    "PRIMUS_CACHE_ROOT=set the cache folder of each library, such as TRITON_CACHE_DIR"
    "PRIMUS_PATCHES=patches are listed by primus-cli direct -- patches list"
    "PRIMUS_EXPECT_IB=add preflight --network before the run"
    "PRIMUS_AUTO_DEPS_SYNC=engines are installed by primus-cli setup"
    "ENABLE_NUMA_BINDING=processes are not bound to NUMA nodes"
    "DUMP_HLO=set XLA_FLAGS=--xla_dump_to=FOLDER"
    "DUMP_HLO_DIR=set XLA_FLAGS=--xla_dump_to=FOLDER"
)

report_variables() {
    local entry name
    for entry in "${WITHOUT_COUNTERPART[@]}"; do
        name=${entry%%=*}
        case "${!name-}" in
            "" | 0) ;;
            *) note "$name is ignored: ${entry#*=}" ;;
        esac
    done
}

# Words for the experiment files in the folder of a file that does not exist.
list_beside() {
    local folder names
    folder=$(dirname "$1")
    [[ -d $folder ]] || return 0
    names=$(shopt -s nullglob && cd "$folder" && printf '%s ' *.yaml *.toml)
    [[ -z ${names// /} ]] || printf 'in %s: %s; ' "$folder" "${names% }"
}

# The variable EXP as the experiment file. The guides of Primus spell a folder `torchtatin`.
find_experiment() {
    [[ -n ${EXP-} ]] || fail "EXP is not set" "EXP=examples/quickstart.yaml bash $0"
    experiment=$EXP
    [[ -f $experiment ]] || experiment=${EXP//torchtatin/torchtitan}
    [[ -f $experiment ]] || [[ ! -f $root/$experiment ]] || experiment=$root/$experiment
    [[ -f $experiment ]] || fail "EXP: no such file: $EXP" "$(list_beside "$EXP")examples are in $root/examples"
    [[ $EXP != *torchtatin* || $experiment == *torchtatin* ]] || note "EXP: read as $experiment"
}

# Words of `train pretrain` in the array `task`.
build_task() {
    find_experiment
    task=(train pretrain --config "$experiment")
    case "${BACKEND-}" in
        "") ;;
        MaxText | maxtext)
            note "BACKEND=$BACKEND: MaxText is an engine of the framework jax"
            task+=(--framework jax)
            ;;
        *) task+=(--framework "$BACKEND") ;;
    esac
    [[ -z ${DATA_PATH-} ]] || task+=(--data_path "$DATA_PATH")
    [[ ${PRIMUS_DETERMINISTIC-} != 1 ]] || task+=(--deterministic true)
    task+=("$@")
    report_variables
}

# Words of the runtime `direct` in the array `direct`: nodes and processes.
build_direct() {
    direct=(direct)
    [[ -z ${GPUS_PER_NODE-} ]] || direct+=(--nproc "$GPUS_PER_NODE")
    if [[ ${NNODES:-1} != 1 ]]; then
        direct+=(--nnodes "$NNODES" --node-rank "${NODE_RANK:-0}")
        [[ -z ${MASTER_ADDR-} ]] || direct+=(--master-addr "$MASTER_ADDR")
        [[ -z ${MASTER_PORT-} ]] || direct+=(--master-port "$MASTER_PORT")
    fi
    [[ -z ${IP_INTERFACE-} ]] || direct+=(--env "NCCL_SOCKET_IFNAME=$IP_INTERFACE" --env "GLOO_SOCKET_IFNAME=$IP_INTERFACE")
}

# Words of the runtime `container` in the array `container`.
build_container() {
    container=(container --image "${DOCKER_IMAGE:-$DEFAULT_IMAGE}")
    [[ -z ${DATA_PATH-} ]] || container+=(--volume "$DATA_PATH")
    [[ ${CLEAN_DOCKER_CONTAINER:-0} == 0 ]] || container+=(--clean)
}

# Replaces the script by primus-cli with the words given.
run_primus() {
    local words=("$@")
    [[ ${PRIMUS_DRY_RUN:-0} == 0 ]] || words=(--dry-run "${words[@]}")
    unset PRIMUS_DRY_RUN # containers get variables of this name
    {
        printf '+ primus-cli'
        printf ' %q' "${words[@]}"
        printf '\n'
    } >&2
    exec "$root/primus-cli" "${words[@]}"
}

show_usage() {
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 0
}
