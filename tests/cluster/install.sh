#!/bin/sh
# Installs the components that tests marked `cluster` need, as root on Debian: what cannot be had is said, and its tests
# are skipped.
#
#   tests/cluster/install.sh [COMPONENT...]    slurm podman apptainer sshd shells prometheus; docker and kubernetes, which is
#                                              compiled, where they are named
set -u
cd "$(dirname "$0")"
for component in ${*:-slurm podman apptainer sshd shells prometheus}; do
    sh "./$component.sh" install >&2 || echo "$0: $component cannot be installed; its tests are skipped" >&2
done
