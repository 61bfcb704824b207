#!/bin/bash
# A Slurm cluster on this machine, for tests: munged, slurmctld, and one slurmd for each node. Root, Debian.
#
#   slurm.sh install               the packages
#   slurm.sh up DIR [NODES [LEAVES [gpus]]]   start nodes n1, n2, ... with their state in DIR; clients then need
#                                  SLURM_CONF=DIR/slurm.conf. They stand in turn below the switches leaf1, leaf2, ...,
#                                  and two of these below each spine
#                                  with `gpus` each has two files that stand for GPUs, and starts are estimated (backfill)
#   slurm.sh stop-controller DIR   the controller ends, and
#   slurm.sh start-controller DIR  is back with the jobs that it had
#   slurm.sh kill-node DIR NODE    the node dies: its slurmd and all that runs under it
#   slurm.sh start-node DIR NODE   it is back
#   slurm.sh mount DIR FROM TO     the nodes have the files of FROM in the folder TO, and the machine of the user has not
#   slurm.sh down DIR              cancel what is left, and end what `up` has started
#
# A node is a slurmd with a host name and an address of its own (127.0.0.11, .12, ...) in namespaces of its own.
set -u
here=$(cd "$(dirname "$0")" && pwd)
if [ "${1-}" = install ]; then # by any shell: what follows is read by bash alone
    . "$here/packages.sh"
    install_packages munge slurmctld slurmd slurm-client
    exit
fi
dir=${2-}
conf=$dir/slurm.conf
export SLURM_CONF=$conf

fail() {
    echo "slurm.sh: $*" >&2
    tail -n 5 "$dir"/*.log >&2 2>/dev/null
    exit 1
}

until_true() { # SECONDS COMMAND...
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < end)) || return 1
        sleep 0.1
    done
}

as_node() { # NODE COMMAND...
    unshare --mount --uts --propagation private \
        sh -c 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"' sh "$dir/hosts" "$@"
}

start_node() {
    mkdir -p "$dir/spool/$1"
    as_node "$1" slurmd -N "$1" || fail "slurmd of $1 does not start"
}

end_node() { # NODE: everything that shares the host name's namespace with its slurmd
    local pid space
    pid=$(cat "$dir/slurmd.$1.pid" 2>/dev/null) || return 1
    space=$(readlink "/proc/$pid/ns/uts") || return 1
    [ "$space" != "$(readlink /proc/self/ns/uts)" ] || return 1
    # One process looks at all others: one for each of them takes a minute on a busy machine.
    find /proc/[0-9]*/ns/uts -printf '%l %h\n' 2>/dev/null | awk -v "space=$space" '$1 == space { print $2 }' |
        tr -dc '0-9\n' | xargs -r kill -KILL 2>/dev/null
    rm -f "$dir/slurmd.$1.pid"
}

mount_on_nodes() { # FROM TO
    local file
    for file in "$dir"/slurmd.*.pid; do
        nsenter --mount --target "$(cat "$file")" mount --bind "$1" "$2" || fail "$2 cannot be mounted"
    done
}

write_topology() { # NODES LEAVES
    local i j
    for ((i = 1; i <= $2; i++)); do
        echo "SwitchName=leaf$i Nodes=$(for ((j = i; j <= $1; j += $2)); do printf 'n%d,' "$j"; done | sed 's/,$//')"
    done
    for ((i = 1; i <= $2; i += 2)); do
        echo "SwitchName=spine$(((i + 1) / 2)) Switches=leaf$i$([ "$i" = "$2" ] || printf ',leaf%d' $((i + 1)))"
    done
    echo "SwitchName=core Switches=spine[1-$((($2 + 1) / 2))]"
}

write_configuration() { # NODES LEAVES [gpus]
    local gres='' number=$(($(printf %s "$dir" | cksum | cut -d ' ' -f 1) % 900)) i
    # Jobs take their master port from their id (20000 to 29999): those of two clusters on this machine must differ.
    local base=$((10000 + number * 10)) first_job=$((1 + number * 100))
    mkdir -p "$dir/state" "$dir/spool" "$dir/munge"
    chmod 711 "$dir/munge"
    (umask 077 && head -c 1024 /dev/urandom >"$dir/munge/key")
    { echo "127.0.0.1 localhost $(hostname)"; for ((i = 1; i <= $1; i++)); do echo "127.0.0.$((10 + i)) n$i"; done; } >"$dir/hosts"
    cat >"$conf" <<CONF
ClusterName=test
FirstJobId=$first_job
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$base
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1
PropagateResourceLimits=NONE
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=5
KillWait=30
MinJobAge=600
StateSaveLocation=$dir/state
SlurmctldPidFile=$dir/slurmctld.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdSpoolDir=$dir/spool/%n
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmdLogFile=$dir/slurmd.%n.log
CONF
    if [ "${3-}" = gpus ]; then
        gres=' Gres=gpu:2'
        echo GresTypes=gpu >>"$conf"
        printf 'Name=gpu File=/dev/%s\n' zero full >"$dir/gres.conf"
        sed -i 's|sched/builtin|sched/backfill|; s|sched_min_interval=0,.*|sched_min_interval=1,sched_interval=1,bf_interval=2|' "$conf"
    fi
    for ((i = 1; i <= $1; i++)); do
        echo "NodeName=n$i NodeHostname=n$i NodeAddr=127.0.0.$((10 + i)) Port=$((base + i)) CPUs=4 RealMemory=8000$gres"
    done >>"$conf"
    echo "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP" >>"$conf"
    echo "CgroupAutomount=no" >"$dir/cgroup.conf"
    [ "$2" = 0 ] || { echo "TopologyPlugin=topology/tree" >>"$conf" && write_topology "$1" "$2" >"$dir/topology.conf"; }
}

all_idle() { [ "$(sinfo -h -t idle -o %D)" = "$1" ]; }

start_controller() { # OPTION...
    slurmctld "$@" || fail "slurmctld does not start"
    until_true 20 scontrol ping || fail "slurmctld does not answer"
}

up() { # NODES LEAVES [gpus]
    local i
    write_configuration "$@"
    munged --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" --pid-file="$dir/munge/pid" \
        --log-file="$dir/munge.log" --seed-file="$dir/munge/seed" --num-threads=2 || fail "munged does not start"
    until_true 10 munge -S "$dir/munge/socket" -n || fail "munged does not answer"
    start_controller -c
    for ((i = 1; i <= $1; i++)); do start_node "n$i"; done
    until_true 30 all_idle "$1" || fail "the nodes do not come up"
}

none_queued() { [ -z "$(squeue -h -o %i)" ]; }

end_by_file() {
    local pid
    pid=$(cat "$1" 2>/dev/null) || return 0
    kill "$pid" 2>/dev/null
    until_true 10 test ! -e "/proc/$pid" || kill -KILL "$pid"
}

down() {
    local file
    squeue -h -o %i 2>/dev/null | xargs -r scancel 2>/dev/null
    until_true 20 none_queued
    for file in "$dir"/slurmd.*.pid; do
        file=${file##*/slurmd.}
        end_node "${file%.pid}"
    done
    end_by_file "$dir/slurmctld.pid"
    end_by_file "$dir/munge/pid"
}

export PATH=$PATH:/usr/sbin:/sbin
case ${1-} in
    up) up "${3:-2}" "${4:-0}" "${5-}" ;;
    down) down ;;
    stop-controller) end_by_file "$dir/slurmctld.pid" ;;
    start-controller) start_controller ;;
    kill-node) end_node "$3" ;;
    start-node) start_node "$3" ;;
    mount) mount_on_nodes "$3" "$4" ;;
    *) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
