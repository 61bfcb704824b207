#!/bin/sh
# Installs a headless Chromium for the tests of HTML reports, where that needs no question asked: as root on Debian or
# Ubuntu. Elsewhere, or without a network, it says so, and those tests are skipped.
set -eu
if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "no Chromium here: install one to test the HTML reports" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
if ! { timeout 300 apt-get update && timeout 600 apt-get install -y --no-install-recommends chromium fonts-dejavu-core; } >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    echo "Chromium could not be installed: the tests of HTML reports are skipped" >&2
fi
rm -f "$log"
