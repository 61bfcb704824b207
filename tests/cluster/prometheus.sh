#!/bin/sh
# A Prometheus server, which scrapes runs in a test of their metrics.
#
#   tests/cluster/prometheus.sh install
set -eu
cd "$(dirname "$0")"
. ./packages.sh
case ${1-} in
install) install_packages prometheus ;;
*) echo "usage: $0 install" >&2 && exit 2 ;;
esac
