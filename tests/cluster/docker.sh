#!/bin/sh
# docker's daemon and client, for tests that start a daemon of their own.
#
#   tests/cluster/docker.sh install
set -eu
cd "$(dirname "$0")"
. ./packages.sh
case ${1-} in
install) install_packages docker.io containerd runc tini iptables ;;
*) echo "usage: $0 install" >&2 && exit 2 ;;
esac
