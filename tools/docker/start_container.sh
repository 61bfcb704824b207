#!/usr/bin/env bash
# Opens a shell in a container with this checkout, with the variables of the script of the same name of AMD-AGI/Primus:
#
#   bash tools/docker/start_container.sh
#
#   DOCKER_IMAGE        image (default: rocm/primus:v26.5)
#   DATA_PATH           folder that is mounted, too
#   CONTAINER_NAME      name of the container
#   PRIMUS_DRY_RUN=1    print what would run
#
# The script of AMD-AGI/Primus leaves a container named dev_primus running, for `docker exec`. This one is the shell
# itself; leaving it removes the container.

set -euo pipefail
# shellcheck source=examples/primus_variables.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../examples/primus_variables.sh"

[[ ${1-} != -h && ${1-} != --help ]] || show_usage
build_container
[[ -z ${CONTAINER_NAME-} ]] || container+=(--name "$CONTAINER_NAME")
note "opening a shell in ${DOCKER_IMAGE:-$DEFAULT_IMAGE}; 'docker exec' is not needed"
cd "$root"
run_primus "${container[@]}" --shell
