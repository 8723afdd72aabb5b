#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Creates .venv with the whole stack for a machine without a GPU, and installs this project into it.
# Environment: PYTHON (default python3.11) and VENV (default .venv). Needs only Python 3.11 with pip and a compiler.
# Run it again at any time: dependencies are installed only if their requirements changed, the project always.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
STAMP=$VENV/.requirements-stamp

die() { echo "setup_venv.sh: $*" >&2; exit 1; }

pip_install() {
    local attempt
    for attempt in 1 2 3 4; do
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@" && return 0
        echo "setup_venv.sh: pip failed (attempt $attempt of 4)" >&2
        sleep $((attempt * 5))
    done
    die "pip install $* failed"
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    return 1
}

# The dependency group of pyproject.toml, read here because the pip that comes with Python 3.11 knows no groups
test_tools() {
    "$VENV/bin/python" -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["test"], sep="\n")'
}

requirements_hash() {
    { cat requirements/cpu*.txt; test_tools; "$VENV/bin/python" --version; } | sha256sum | cut -d' ' -f1
}

if [[ ! -x $VENV/bin/python ]]; then
    python=$(find_python) || die "no Python 3.11 found; name one with PYTHON="
    "$python" -m venv "$VENV"
fi

hash=$(requirements_hash)
if [[ $(cat "$STAMP" 2>/dev/null || true) != "$hash" ]]; then
    rm -f "$STAMP"
    echo "setup_venv.sh: installing torch, verl, SGLang and Megatron for the CPU into $VENV, two to five minutes"
    # torch alone and first: whatever is resolved later takes the CPU build that is there instead of a CUDA one.
    pip_install "$(grep '^torch==' requirements/cpu.txt)"
    test_tools > "$VENV/test-tools.txt"
    pip_install -r requirements/cpu.txt -r "$VENV/test-tools.txt"
    pip_install --no-deps -r requirements/cpu-no-deps.txt
    # verl's default Megatron bridge, for another Python; the core's one compiled module makes datasets, which verl does not
    rm -rf "$VENV/megatron-bridge"
    pip_install --no-deps --ignore-requires-python --only-binary :all: --python-version 3.12 \
        --target "$VENV/megatron-bridge" -r requirements/cpu-megatron-bridge.txt
    echo "$hash" > "$STAMP"
fi

# A build folder of an earlier version would smuggle deleted modules into the wheel.
rm -rf {.,cpu_stack}/build {.,cpu_stack}/*.egg-info
pip_install --quiet --no-deps --no-build-isolation --force-reinstall . ./cpu_stack
rm -rf {.,cpu_stack}/build {.,cpu_stack}/*.egg-info
echo "setup_venv.sh: ready, $VENV/bin/python"
