# Sourced by the scripts of this folder.
export DEBIAN_FRONTEND=noninteractive

install_packages() { # PACKAGE...: those that are missing, without starting their services
    missing=
    for package; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    policy=/usr/sbin/policy-rc.d
    if [ ! -e $policy ]; then
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod +x $policy
        ours=1
    fi
    log=$(mktemp)
    # shellcheck disable=SC2086
    { apt-get -o DPkg::Lock::Timeout=300 update && apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends $missing; } >"$log" 2>&1
    status=$?
    [ $status = 0 ] || tail -n 20 "$log" >&2
    rm -f "$log"
    [ -z "${ours-}" ] || rm -f $policy
    return $status
}
