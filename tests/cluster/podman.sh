#!/bin/sh
# podman, for tests that give it storage of its own.
#
#   tests/cluster/podman.sh install
set -eu
cd "$(dirname "$0")"
. ./packages.sh
case ${1-} in
install) install_packages podman runc conmon catatonit python3-minimal ;;
*) echo "usage: $0 install" >&2 && exit 2 ;;
esac
