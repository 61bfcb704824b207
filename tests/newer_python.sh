#!/bin/sh
# Runs tests of the Megatron backend on the newest of Python 3.13 and 3.12 that is found, for which other versions of
# megatron-core are published than for 3.11; does nothing where neither is found. What depends on that version are losses
# in every layout and resumed runs; with two versions of Python, the environment of an engine is made by the other one, too.
# TESTS is another choice of tests, and `TESTS=` runs all.
set -eu
cd "$(dirname "$0")/.."
for version in 3.13 3.12; do
    for python in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
        [ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || :)" = "$version" ] || continue
        echo "== Python $version: $python"
        # uv, which comes with the development environment, installs in a third of pip's time.
        export PRIMUS_VENV="$PWD/.venv-python$version" PRIMUS_PYTHON="$python" PATH="$PWD/.venv/bin:$PATH"
        # Where no index has a small PyTorch for CPUs, it is 3 GB: CI has no time for more than five minutes.
        ${TIMEOUT-timeout 300} ./primus-cli setup --dev --engine megatron || {
            echo "megatron-core cannot be installed for Python $version: it is not tested" >&2
            exit 0
        }
        exec "$PRIMUS_VENV/bin/python" -m pytest -q tests/frameworks/megatron tests/engines \
            -k "${TESTS-one_process_has or in_every_layout or undisturbed or other_interpreter}"
    done
done
echo "no Python 3.12 or 3.13 here: the newest megatron-core is not tested"
