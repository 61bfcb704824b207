# Shell functions that hooks of AMD-AGI/Primus expect to find in their environment: those that its runner/lib/common.sh
# exports, with the same names, arguments and exit codes. Run as `bash hook_functions.sh COMMAND ARGUMENT...`.

export PRIMUS_LOG_LEVEL="${PRIMUS_LOG_LEVEL:-INFO}" # DEBUG, INFO, WARN or ERROR

_primus_shows() { # LEVEL: whether lines of it are shown
    case "${PRIMUS_LOG_LEVEL:-INFO}:$1" in
        *:ERROR | DEBUG:* | INFO:INFO | INFO:SUCCESS | *:WARN) [[ "${PRIMUS_LOG_LEVEL:-INFO}:$1" != ERROR:WARN ]] ;;
        *) return 1 ;;
    esac
}

_primus_log() { # LEVEL MESSAGE...
    local level="$1"
    shift
    _primus_shows "$level" || return 0
    local node="NODE-${NODE_RANK:-?}(${HOSTNAME:-$(hostname)})"
    printf '[%(%Y-%m-%d %H:%M:%S)T] [%s] [%s] %b\n' -1 "$node" "$level" "$*"
}

LOG_DEBUG() { _primus_log DEBUG "$@"; }
LOG_INFO() { _primus_log INFO "$@"; }
LOG_SUCCESS() { _primus_log SUCCESS "$@"; }
LOG_WARN() { _primus_log WARN "$@" >&2; }
LOG_ERROR() { _primus_log ERROR "$@" >&2; }

_primus_on_node_0() { [[ "${NODE_RANK:-0}" == 0 ]]; }

LOG_DEBUG_RANK0() { ! _primus_on_node_0 || LOG_DEBUG "$@"; }
LOG_INFO_RANK0() { ! _primus_on_node_0 || LOG_INFO "$@"; }
LOG_SUCCESS_RANK0() { ! _primus_on_node_0 || LOG_SUCCESS "$@"; }
LOG_ERROR_RANK0() { ! _primus_on_node_0 || LOG_ERROR "$@"; }

PRINT_DEBUG() { ! _primus_shows DEBUG || printf '%s\n' "$*"; }
PRINT_INFO() { ! _primus_shows INFO || printf '%s\n' "$*"; }
PRINT_SUCCESS() { ! _primus_shows SUCCESS || printf '%s\n' "$*"; }
PRINT_WARN() { ! _primus_shows WARN || printf '%s\n' "$*" >&2; }
PRINT_ERROR() { printf '%s\n' "$*" >&2; }
PRINT_DEBUG_RANK0() { ! _primus_on_node_0 || PRINT_DEBUG "$@"; }
PRINT_INFO_RANK0() { ! _primus_on_node_0 || PRINT_INFO "$@"; }
PRINT_SUCCESS_RANK0() { ! _primus_on_node_0 || PRINT_SUCCESS "$@"; }

print_section() { PRINT_INFO_RANK0 "== $1 =="; }

log_exported_vars() { # TITLE NAME...
    LOG_INFO_RANK0 "$1:"
    local name
    for name in "${@:2}"; do LOG_INFO_RANK0 "    $name=${!name:-<unset>}"; done
}

print_system_info() {
    PRINT_INFO_RANK0 "host $(hostname), kernel $(uname -r), $(get_cpu_count) CPUs, $(get_memory_gb) GB memory"
}

die() {
    LOG_ERROR "$@"
    exit 1
}

require_command() { # NAME [HINT]
    command -v "$1" >/dev/null 2>&1 || die "required command not found: $1${2:+. $2}"
}

require_file() { [[ -f "$1" ]] || die "${2:-file not found: $1}"; }
require_dir() { [[ -d "$1" ]] || die "${2:-directory not found: $1}"; }

run_cmd() { eval "$*" || die "command failed (exit code: $?): $*"; }

run_cmd_capture() {
    local output code=0
    output="$(eval "$*" 2>&1)" || code=$?
    if [[ $code -ne 0 ]]; then
        LOG_ERROR "command failed (exit code: $code): $*"
        LOG_ERROR "$output"
        return "$code"
    fi
    printf '%s\n' "$output"
}

get_absolute_path() { realpath -m "$1" 2>/dev/null || readlink -f "$1" 2>/dev/null || printf '%s\n' "$1"; }
get_script_dir() { (cd "$(dirname "$(realpath "${BASH_SOURCE[1]:-$0}")")" && pwd); }
ensure_dir() { mkdir -p "$1" || die "failed to create directory: $1"; }
cleanup_temp() { [[ -z "$1" || ! -e "$1" ]] || rm -rf "$1" || LOG_WARN "failed to clean up: $1"; }

export_and_log() { # NAME VALUE
    export "$1=$2"
    LOG_DEBUG_RANK0 "exported: $1=$2"
}

set_default() { # NAME VALUE
    [[ -n "${!1:-}" ]] || export "$1=$2"
}

load_env_file() { # FILE of NAME=VALUE lines
    if [[ ! -f "$1" ]]; then
        LOG_WARN "environment file not found: $1"
        return 1
    fi
    local line value
    while IFS= read -r line || [[ -n "$line" ]]; do
        [[ "$line" =~ ^[[:space:]]*([A-Za-z_][A-Za-z0-9_]*)=(.*)$ ]] || continue
        value="${BASH_REMATCH[2]}"
        value="${value#[\"\']}"
        export "${BASH_REMATCH[1]}=${value%[\"\']}"
    done <"$1"
}

contains() { [[ "$1" == *"$2"* ]]; }

trim() {
    local text="$*"
    text="${text#"${text%%[![:space:]]*}"}"
    printf '%s\n' "${text%"${text##*[![:space:]]}"}"
}

join_by() { # SEPARATOR FIRST ITEM...
    local separator="$1" first="${2:-}"
    shift $(($# > 1 ? 2 : 1))
    printf '%s' "$first" "${@/#/$separator}"
}

get_cpu_count() { nproc 2>/dev/null || echo 1; }
get_memory_gb() { awk '/^MemTotal/ {print int($2 / 1048576)}' /proc/meminfo; }
is_container() { [[ -f /.dockerenv || -f /run/.containerenv ]] || grep -q docker /proc/1/cgroup 2>/dev/null; }
is_slurm_job() { [[ -n "${SLURM_JOB_ID:-}${SLURM_JOBID:-}" ]]; }

parse_key_value() { # NAME=VALUE
    [[ "$1" == *=* ]] && printf '%s %s\n' "${1%%=*}" "${1#*=}"
}

is_flag() { [[ "$1" == -* ]]; }
get_primus_version() { echo unknown; }

register_cleanup_hook() { # COMMAND that runs when the script ends
    PRIMUS_CLEANUP_HOOKS+=("$1")
    trap run_cleanup_hooks EXIT INT TERM
}

run_cleanup_hooks() {
    local code=$? command
    for command in "${PRIMUS_CLEANUP_HOOKS[@]:-:}"; do eval "$command" || LOG_WARN "clean-up failed: $command"; done
    exit "$code"
}

# shellcheck disable=SC2046 # a word for each function
export -f $(declare -F | cut -d ' ' -f 3)
exec "$@"
