#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Adds checkpoint-engine to the payload of benchmarks/gpu_visit.sh: 41 kB.
# Usage: bash benchmarks/stage_checkpoint_engine.sh [.gpu]
set -euo pipefail

payload=$(cd "${1:-.gpu}" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --no-deps --no-compile --target "$folder" checkpoint-engine==0.4.2
# install.sh unpacks every .tar.xz of the payload into the site folder
tar -cJf "$payload/checkpoint-engine.tar.xz" -C "$folder" --exclude=__pycache__ --exclude=bin .
ls -l "$payload/checkpoint-engine.tar.xz"
