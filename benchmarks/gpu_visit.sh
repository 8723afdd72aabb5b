#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Measures cases on an offline GPU machine, in one visit.
#   COMMIT=... bash benchmarks/gpu_visit.sh [phase|transfer|soak] ARGUMENTS [-- [phase|transfer|soak] ARGUMENTS ...]
# Each case takes the arguments of `python -m benchmarks.phase` (or transfer, soak) but --work and --out; --profile of
# phase and transfer takes no folder here. Run it in the repository's root, next to the payload in .gpu; results
# (CASE.json), profiles (CASE-profile.json and .md), traces (traces.tgz) and logs (logs.tgz) go to $OUT.
# VISIT_SECONDS bounds the whole visit.
# Variables of NCCL and NVLink stay as the machine sets them.

SECONDS=0
LIMIT=${VISIT_SECONDS:-570}
OUT=${OUT:?a folder for the results}
REPO=$PWD
SITE=/tmp/site
BENCH=/tmp/bench

install_package() {
  local source=/tmp/plugin-src
  rm -rf "$source" && mkdir -p "$source"
  tar c --exclude=./.gpu --exclude=./.git . | tar x -C "$source"
  python3 -m pip install -q --no-index --no-deps --no-build-isolation --no-compile --upgrade --target "$SITE" "$source"
}

check_package() {
  python3 - <<'PY'
from importlib.metadata import entry_points, version

print("verl-sync-plugin", version("verl-sync-plugin"), [p.value for p in entry_points(group="verl.plugins")])
PY
}

run_case() {
  local harness=phase name="" previous="" word left=$((LIMIT - SECONDS)) words=()
  case "$1" in phase | transfer | soak) harness=$1 && shift ;; esac
  for word in "$@"; do
    [ "$previous" = --case ] && name=$word
    previous=$word
    words+=("$word")
    [ "$word" = --profile ] && words+=("$BENCH/profiles")
  done
  words+=(--work "$BENCH/work" --out "$OUT/${name:?--case is missing}.json")
  if [ "$harness" = phase ]; then
    case " $* " in *" megatron "*) python3 /tmp/s/patch_mbridge.py ;; esac
    python3 -m benchmarks.phase "${words[@]}" --budget "$left"
  elif [ "$left" -lt 60 ]; then
    echo "no time left for $name" >&2
    return 1
  else
    mkdir -p "$BENCH/work"
    # TERM lets it end its server; KILL, later, does not
    timeout -k 40 "$left" python3 -m "benchmarks.$harness" "${words[@]}" >"$BENCH/work/$name.log" 2>&1
    local status=$?
    tail -n 40 "$BENCH/work/$name.log"
    return $status
  fi
}

save_logs() {
  (cd "$BENCH/work" 2>/dev/null && find . -maxdepth 1 \( -name '*.log' -o -name '*.jsonl' \) -print0 |
    tar czf "$OUT/logs.tgz" --null -T -)
  # few files come back from such a machine: the traces as one
  cd "$BENCH/profiles" 2>/dev/null || return
  cp -- *-profile.json *-profile.md "$OUT/"
  tar czf "$OUT/traces.tgz" -- *.trace.json.gz
}

bash .gpu/scripts/install.sh .gpu || exit 1
. /tmp/s/env.sh
# the probe must be importable in every process, and nothing else of the checkout: its folders would shadow packages
rm -rf "$BENCH/benchmarks" "$BENCH/profiles" && mkdir -p "$BENCH" && cp -r benchmarks "$BENCH/"
export PYTHONPATH=$BENCH:$PYTHONPATH
cd /tmp || exit 1
(cd "$REPO" && install_package) || exit 1
check_package || exit 1
trap save_logs EXIT

status=0
arguments=()
for word in "$@" --; do
  if [ "$word" != -- ]; then
    arguments+=("$word")
    continue
  fi
  [ ${#arguments[@]} -eq 0 ] && continue
  run_case "${arguments[@]}" || status=1
  arguments=()
done
exit $status
