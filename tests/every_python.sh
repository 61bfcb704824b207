#!/bin/sh
# Runs the control plane's tests, without torch, on each Python from 3.10 to 3.13 that is found; fails if any does.
set -eu
cd "$(dirname "$0")/.."
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
passed='' failed=''
for version in 3.10 3.11 3.12 3.13; do
    for python in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
        [ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || :)" = "$version" ] || continue
        echo "== Python $version: $python"
        "$python" -m venv "$tools/$version"
        "$tools/$version/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
            --editable . hypothesis import-linter jsonschema pytest pytest-timeout setuptools
        if "$tools/$version/bin/python" -m pytest -q; then passed="$passed $version"; else failed="$failed $version"; fi
        break
    done
done
echo "passed on:${passed:- none}; failed on:${failed:- none}"
[ -n "$passed" ] && [ -z "$failed" ]
