#!/bin/bash
# pyxis and enroot, for tests. No archive of Debian has them, so they are compiled from their published sources.
#
#   PRIMUS_TEST_PYXIS_SOURCES=FOLDER tests/cluster/pyxis.sh install
#
# FOLDER holds the checkouts `pyxis` and `enroot` of github.com/NVIDIA. They are installed into $PRIMUS_TEST_PYXIS.
# Two nodes on one machine must not share a folder of containers: enroot.conf names one for each host name.
set -eu
cd "$(dirname "$0")"
. ./packages.sh
place=${PRIMUS_TEST_PYXIS:-/opt/primus-test-pyxis}

install() {
    [ ! -x "$place/lib/spank_pyxis.so" ] || return 0
    sources=${PRIMUS_TEST_PYXIS_SOURCES:?names no folder with the sources of pyxis and enroot}
    install_packages gcc make libc6-dev libbsd-dev libslurm-dev squashfs-tools jq curl zstd parallel gawk
    local conf=$place/etc/enroot
    mkdir -p "$place/bin" "$place/lib/enroot" "$conf/environ.d" "$conf/mounts.d" "$conf/hooks.d"
    for tool in aufs2ovlfs mksquashovlfs mount switchroot nsenter; do
        gcc -w -std=gnu99 -O2 -D_GNU_SOURCE -include bsd/string.h -include bsd/stdlib.h \
            "$sources/enroot/bin/enroot-$tool.c" -o "$place/bin/enroot-$tool" -lbsd
    done
    sed -e "s;@sysconfdir@;$conf;" -e "s;@libdir@;$place/lib/enroot;" -e "s;@version@;test;" \
        "$sources/enroot/enroot.in" >"$place/bin/enroot"
    chmod +x "$place/bin/enroot"
    cp "$sources"/enroot/src/*.sh "$place/lib/enroot"
    cp "$sources"/enroot/conf/environ/* "$conf/environ.d"
    cp "$sources"/enroot/conf/mounts/*.fstab "$conf/mounts.d"
    cp "$sources"/enroot/conf/hooks/*.sh "$conf/hooks.d"
    printf 'ENROOT_%s_PATH /tmp/primus-test-enroot/$(hostname)/%s\n' DATA data RUNTIME run >"$conf/enroot.conf"
    build=$(mktemp -d)
    trap 'rm -rf "$build"' EXIT
    cp -r "$sources/pyxis" "$build"
    make -s -C "$build/pyxis"
    install_file "$build/pyxis/spank_pyxis.so" "$place/lib/spank_pyxis.so"
}

install_file() { # FROM TO: by rename
    cp "$1" "$2.new"
    mv "$2.new" "$2"
}

case ${1-} in
install) install ;;
*) sed -n '2,8s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
