#!/bin/bash
#SBATCH -J "it's a \"name\""
#SBATCH --comment="$(id) `id` # \\ é"
#SBATCH -C a&b|c
#SBATCH -e "my log/%j"
#SBATCH --ntasks-per-node=1
#SBATCH --output=/shared/runs/prod/20260102_030405-abcd/logs/slurm-%j.out
#SBATCH --open-mode=append

# Each node starts one launcher; when a step of the job has ended, `primus-cli jobs next` says what follows.
set -uo pipefail

run=/shared/runs/prod/20260102_030405-abcd
num_nodes=$SLURM_JOB_NUM_NODES
launcher=(
    /opt/primus/primus-cli direct --
    train pretrain
    --run /shared/runs/prod/20260102_030405-abcd
)
next=(
    primus-cli direct
    --single
    --no-hooks --
    jobs next /shared/runs/prod/20260102_030405-abcd
    --max-restarts=0
    --restart-delay=30
)

export SLURM_EXPORT_ENV=ALL # steps start empty where the job was submitted with --export=NONE
# srun has not inherited the cores of a task since 22.05.
[ -z "${SLURM_CPUS_PER_TASK-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# The end of the job is announced: the launchers save and end. A plain `scancel` reaches them by itself.
warned=
step=
on_warning() {
    warned=yes
    echo "primus: the end of job $SLURM_JOB_ID is announced: its processes save and end" >&2
    [ -z "$step" ] || kill -USR1 "$step"
}
trap on_warning USR1

# srun waits for a node that has died until Slurm has noticed (SlurmdTimeout). The other launchers know at once, do
# their hooks, and leave together.
num_partings() { grep -c '"kind":"nodes_left"' "$run/events.jsonl" 2>/dev/null; }
watch() {
    local before
    before=$(num_partings)
    until (($(num_partings) > ${before:-0})); do sleep 1; done
    sleep 5
    kill -TERM "$1" 2>/dev/null && sleep 2
    kill -KILL "$1" 2>/dev/null
}

queue_again() {
    exit "$((code ? code : 1))"
}

excluded=
while :; do
    echo "primus: job $SLURM_JOB_ID starts on $num_nodes nodes${excluded:+ without $excluded}" >&2
    # --overlap: the step before may still count as running on a node that is gone.
    srun --nodes="$num_nodes" --ntasks="$num_nodes" --overlap \
        --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=60 --input=none --unbuffered --cpu-bind=none \
        ${excluded:+--exclude="$excluded"} "${launcher[@]}" &
    step=$!
    watch "$step" &
    watcher=$!
    while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a trap ends `wait` early
    wait "$step"
    code=$?
    step=
    kill "$watcher" 2>/dev/null
    answer=$("${next[@]}" --exit-code="$code" --num-nodes="$num_nodes" ${warned:+--warned} \
        ${excluded:+--excluded="$excluded"}) || exit "$((code ? code : 1))"
    read -r action value nodes <<<"$answer"
    case $action in
        finish) exit 0 ;;
        restart)
            excluded=$nodes
            sleep "$value" &
            wait $!
            [ -z "$warned" ] || queue_again
            ;;
        requeue) queue_again ;;
        *) exit "${value:-1}" ;;
    esac
done
