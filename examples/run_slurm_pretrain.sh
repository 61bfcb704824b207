#!/usr/bin/env bash
# Pre-trains on the nodes of a Slurm cluster, in containers, with the variables of the script of the same name of
# AMD-AGI/Primus:
#
#   NNODES=8 EXP=FILE bash examples/run_slurm_pretrain.sh [--train_iters 20 ...]
#
#   NNODES                  nodes (default: 1)
#   DOCKER_IMAGE            image (default: rocm/primus:v26.5)
#   SLURM_PARTITION, SLURM_TIME, SLURM_NODELIST, NODE_LIST    options of srun
#   EXP, BACKEND, DATA_PATH, GPUS_PER_NODE, PRIMUS_DRY_RUN: see run_pretrain.sh

set -euo pipefail
# shellcheck source=examples/primus_variables.sh
source "$(dirname "${BASH_SOURCE[0]}")/primus_variables.sh"

[[ ${1-} != -h && ${1-} != --help ]] || show_usage
slurm=(slurm srun -N "${NNODES:-1}" --exclusive)
[[ -z ${SLURM_PARTITION-} ]] || slurm+=(--partition="$SLURM_PARTITION")
[[ -z ${SLURM_TIME-} ]] || slurm+=(--time="$SLURM_TIME")
nodes=${SLURM_NODELIST:-${NODE_LIST-}}
[[ -z $nodes ]] || slurm+=(--nodelist="$nodes")
for name in MASTER_ADDR NODE_RANK; do
    [[ -z ${!name-} ]] || note "$name is ignored: Slurm's nodes decide"
    unset "$name"
done
build_task "$@"
unset NNODES # the nodes of the step, not those of each node
build_direct
build_container
run_primus "${slurm[@]}" -- "${container[@]}" -- "${direct[@]}" -- "${task[@]}"
