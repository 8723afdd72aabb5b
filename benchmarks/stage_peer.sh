#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Adds a package of Python files to the payload of benchmarks/gpu_visit.sh, without what it depends on: another project's
# weight transfer (less than 0.3 MB each), or a part of pytest.
# Usage: bash benchmarks/stage_peer.sh checkpoint-engine==0.4.2|awex==0.9.0|pytest==9.1.1|... [.gpu]
set -euo pipefail

package=${1:?checkpoint-engine==0.4.2 or awex==0.9.0}
payload=$(cd "${2:-.gpu}" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --no-deps --no-compile --target "$folder" "$package"
# install.sh unpacks every .tar.xz of the payload into the site folder
archive=$payload/${package%%=*}.tar.xz
tar -cJf "$archive" -C "$folder" --exclude=__pycache__ --exclude=bin --exclude=tests .
ls -l "$archive"
