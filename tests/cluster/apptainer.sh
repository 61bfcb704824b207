#!/bin/sh
# apptainer, for tests that build an image of their own.
#
#   tests/cluster/apptainer.sh install
#
# Where the release has no package of it, unstable's is taken from the same archive. That is linked against a newer C
# library, which goes into a folder of its own; nothing else on the machine sees it.
set -eu
cd "$(dirname "$0")"
. ./packages.sh
GLIBC=/opt/primus-test-glibc

install() {
    ! works || return 0
    if apt-cache show apptainer >/dev/null 2>&1; then
        install_packages apptainer
    else
        install_packages patchelf squashfs-tools libseccomp2 libsqlite3-0 uidmap
        from_unstable
    fi
    works
}

works() { apptainer --version >/dev/null 2>&1; }

archive() { # the address of the Debian archive that this machine uses
    apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' |
        sed -n '/security/d; s/^Debian //p' | head -n 1
}

from_unstable() {
    place=$(mktemp -d)
    trap 'rm -rf "$place"' EXIT
    mkdir -p "$place/lists/partial" "$place/cache/archives/partial" "$place/files"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(archive) unstable main" >"$place/sources"
    set -- -o Dir::Etc::SourceList="$place/sources" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State::Lists="$place/lists" -o Dir::Cache="$place/cache" -o Acquire::Languages=none -o APT::Sandbox::User=root
    apt-get "$@" -qq update
    (cd "$place" && apt-get "$@" -qq download apptainer libc6 && for file in *.deb; do dpkg-deb -x "$file" files; done)
    machine=$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || echo "$(uname -m)-linux-gnu")
    mkdir -p "$GLIBC" /var/lib/apptainer/mnt/session /var/lib/apptainer/mnt/source
    cp -a "$place/files/usr/lib/$machine/"*.so* "$GLIBC/"
    cp -a "$place/files/etc/apptainer" /etc/
    cp -a "$place/files/usr/lib/$machine/apptainer" "/usr/lib/$machine/"
    cp -a "$place/files/usr/bin/apptainer" /usr/bin/
    for program in /usr/bin/apptainer "/usr/lib/$machine/apptainer/bin/starter"; do
        patchelf --set-interpreter "$(echo "$GLIBC"/ld-linux*.so.*)" --set-rpath "$GLIBC:/usr/lib/$machine" "$program"
    done
    # Root of some machines lacks a capability, and is then refused all of them.
    sed -i 's/^root default capabilities = .*/root default capabilities = no/' /etc/apptainer/apptainer.conf
}

case ${1-} in
install) install ;;
*) echo "usage: $0 install" >&2 && exit 2 ;;
esac
