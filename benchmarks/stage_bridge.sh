#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Adds Megatron-Bridge and the megatron-core that it needs to the payload of benchmarks/gpu_visit.sh: 2 MB, for Python 3.12.
# Usage: bash benchmarks/stage_bridge.sh [.gpu]
set -euo pipefail

payload=$(cd "${1:-.gpu}" && pwd)
requirements=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/requirements/cpu-megatron-bridge.txt
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --no-deps --ignore-requires-python --only-binary :all: --python-version 3.12 \
    --target "$folder" -r "$requirements"
tar -cJf "$payload/bridge.txz" -C "$folder" --exclude=__pycache__ --exclude=megatron/bridge/recipes \
    --exclude='*.cpp' megatron
ls -l "$payload/bridge.txz"
