#!/bin/sh
# docker's daemon and client. The tests use podman; where docker runs as well, what they say of podman can be tried by hand.
#
#   tests/cluster/docker.sh install
set -eu
cd "$(dirname "$0")"
. ./packages.sh
case ${1-} in
install) install_packages docker.io containerd runc tini iptables ;;
*) echo "usage: $0 install" >&2 && exit 2 ;;
esac
