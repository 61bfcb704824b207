#!/usr/bin/env bash
# Pre-trains on this machine, with the variables of the script of the same name of AMD-AGI/Primus:
#
#   EXP=examples/quickstart.yaml bash examples/run_pretrain.sh [--train_iters 20 ...]
#
#   EXP                    experiment file
#   BACKEND                framework: megatron, torchtitan, ... (default: the experiment's)
#   DATA_PATH              folder of datasets
#   GPUS_PER_NODE          processes (default: one per GPU)
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT
#   PRIMUS_DRY_RUN=1       print what would run

set -euo pipefail
# shellcheck source=examples/primus_variables.sh
source "$(dirname "${BASH_SOURCE[0]}")/primus_variables.sh"

[[ ${1-} != -h && ${1-} != --help ]] || show_usage
build_task "$@"
build_direct
run_primus "${direct[@]}" -- "${task[@]}"
