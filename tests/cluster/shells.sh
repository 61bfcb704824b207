#!/bin/sh
# zsh and fish, for tests of the completion of command lines.
#
#   tests/cluster/shells.sh install
set -eu
cd "$(dirname "$0")"
. ./packages.sh
case ${1-} in
install) install_packages zsh fish ;;
*) echo "usage: $0 install" >&2 && exit 2 ;;
esac
