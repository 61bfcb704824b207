#!/bin/sh
# OpenSSH's client and server, for tests that start servers of their own on loopback addresses.
#
#   tests/cluster/sshd.sh install
set -eu
cd "$(dirname "$0")"
. ./packages.sh
case ${1-} in
install) install_packages openssh-client openssh-server ;;
*) echo "usage: $0 install" >&2 && exit 2 ;;
esac
