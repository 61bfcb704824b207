#!/usr/bin/env bash
# Pre-trains in a container on this machine, with the variables of the script of the same name of AMD-AGI/Primus:
#
#   EXP=examples/quickstart.yaml bash examples/run_local_pretrain.sh [--train_iters 20 ...]
#
#   DOCKER_IMAGE                image (default: rocm/primus:v26.5 on a machine with GPUs; without GPUs or without
#                               a container engine, training runs on the machine itself)
#   CONTAINER_NAME              name of the container
#   CLEAN_DOCKER_CONTAINER=1    remove ended containers of primus first
#   SKIP_TRAIN=1                stop before training
#   EXP, BACKEND, DATA_PATH, GPUS_PER_NODE, NNODES, ..., PRIMUS_DRY_RUN: see run_pretrain.sh

set -euo pipefail
# shellcheck source=examples/primus_variables.sh
source "$(dirname "${BASH_SOURCE[0]}")/primus_variables.sh"

uses_container() {
    [[ -z ${DOCKER_IMAGE-} ]] || return 0
    [[ -e /dev/kfd || -e /dev/nvidiactl ]] || return 1
    command -v docker || command -v podman || command -v apptainer
} >/dev/null

[[ ${1-} != -h && ${1-} != --help ]] || show_usage
build_task "$@"
build_direct
if [[ ${SKIP_TRAIN:-0} == 1 ]]; then
    note "SKIP_TRAIN=1: nothing is started"
    exit 0
fi
if uses_container; then
    build_container
    [[ -z ${CONTAINER_NAME-} ]] || container+=(--name "$CONTAINER_NAME")
    run_primus "${container[@]}" -- "${direct[@]}" -- "${task[@]}"
fi
note "no GPU or no container engine here: training runs on this machine; set DOCKER_IMAGE to use a container"
run_primus "${direct[@]}" -- "${task[@]}"
