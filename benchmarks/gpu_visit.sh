#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Measures cases on an offline GPU machine, in one visit.
#   COMMIT=... bash benchmarks/gpu_visit.sh [HARNESS] ARGUMENTS [-- [HARNESS] ARGUMENTS ...]
# HARNESS is phase (where none is named), memory, transfer, pauses or soak.
# Each case takes the arguments of that harness but --work and --out. Run it in the repository's root; PAYLOAD is the
# payload's folder (.gpu), SOURCE the checkout to install (this one). Results (CASE.json) and logs (logs.tgz) go to $OUT.
# VISIT_SECONDS bounds the whole visit, CASE_SECONDS tests and a case of transfer, pauses or soak (phase has its
# --timeout). "model --size SIZE" only makes a model for phase; "tests WORD ..." runs pytest, which has to be in the
# payload (benchmarks/README.md), with these words and the installed package.
#   COMMIT=... bash benchmarks/gpu_visit.sh --lanes FILE
# runs several lanes at the same time, each on GPUs of its own: a line "lane 0,1" of the file opens one, every other line
# is a case of it, as above; a line "wait" waits for all lanes so far. Lanes share the host's processors and memory, so
# give them a machine that has enough. A model that an earlier lane with the same first GPU has made is used again.
# A machine that is still warm from a visit with the same package and payload keeps them, and its models.
# Variables of NCCL and NVLink stay as the machine sets them.

SECONDS=0
LIMIT=${VISIT_SECONDS:-570}
CASE_LIMIT=${CASE_SECONDS:-300}
OUT=${OUT:?a folder for the results}
REPO=$PWD
PAYLOAD=$(cd "${PAYLOAD:-.gpu}" && pwd) || exit 1
SOURCE=$(cd "${SOURCE:-.}" && pwd) || exit 1
SITE=/tmp/site
BENCH=/tmp/bench
# Megatron-Bridge with its megatron-core, from bridge.txz of the payload (benchmarks/stage_bridge.sh)
BRIDGE_SITE=/tmp/bridge-site

install_package() {
  local source=/tmp/plugin-src
  rm -rf "$source" && mkdir -p "$source"
  tar c --exclude='./.gpu*' --exclude=./.git . | tar x -C "$source"
  python3 -m pip install -q --no-index --no-deps --no-build-isolation --no-compile --upgrade --target "$SITE" \
    "$source" "$source/cpu_stack"
}

check_package() {
  python3 - <<'PY'
from importlib.metadata import entry_points, version

print("verl-sync-plugin", version("verl-sync-plugin"), [p.value for p in entry_points(group="verl.plugins")])
PY
}

run_case() {
  local harness=phase name="" previous="" word left=$((LIMIT - SECONDS)) words=()
  if [ "$1" = model ]; then
    shift
    python3 -m benchmarks.models "$@" --out "$BENCH/work/model-$2" --device cuda
    return
  fi
  if [ "$1" = tests ]; then
    shift
    [ "$left" -gt "$CASE_LIMIT" ] && left=$CASE_LIMIT
    local log=$BENCH/work/tests-$SECONDS.log
    (cd "$REPO" && VERL_PLATFORM=nvidia timeout -k 10 "$left" python3 -P -m pytest -q -p no:cacheprovider --durations=10 \
      "$@") >"$log" 2>&1
    local status=$?
    tail -n 25 "$log"
    return $status
  fi
  case "$1" in phase | memory | transfer | pauses | soak) harness=$1 && shift ;; esac
  for word in "$@"; do
    [ "$previous" = --case ] && name=$word
    previous=$word
    words+=("$word")
  done
  words+=(--work "$BENCH/work" --out "$OUT/${name:?--case is missing}.json")
  if [ "$harness" = phase ]; then
    local path=$PYTHONPATH
    [[ $name == *-bridge* ]] && path=$BRIDGE_SITE:$path
    PYTHONPATH=$path python3 -m benchmarks.phase "${words[@]}" --budget "$left"
  elif [ "$harness" = memory ]; then
    python3 -m benchmarks.memory "${words[@]}" --budget "$left"
  elif [ "$left" -lt 60 ]; then
    echo "no time left for $name" >&2
    return 1
  else
    mkdir -p "$BENCH/work"
    [ "$left" -gt "$CASE_LIMIT" ] && left=$CASE_LIMIT
    # TERM lets it end its server; KILL, later, does not
    timeout -k 40 "$left" python3 -m "benchmarks.$harness" "${words[@]}" >"$BENCH/work/$name.log" 2>&1
    local status=$?
    tail -n 40 "$BENCH/work/$name.log"
    return $status
  fi
}

run_cases() {
  local word status=0 arguments=()
  for word in "$@" --; do
    if [ "$word" != -- ]; then
      arguments+=("$word")
      continue
    fi
    [ ${#arguments[@]} -eq 0 ] && continue
    run_case "${arguments[@]}" || status=1
    arguments=()
  done
  return $status
}

start_lane() {
  local gpus=$1 name=lane-${1%%,*}
  shift
  (
    export CUDA_VISIBLE_DEVICES=$gpus RAY_TMPDIR=/tmp/ray-$name
    BENCH=$BENCH/$name
    mkdir -p "$RAY_TMPDIR" "$BENCH/work"
    run_cases "$@" >>"$BENCH/work/$name.log" 2>&1
  ) &
}

wait_for_lanes() {
  local status=0 job
  for job in $(jobs -p); do wait "$job" || status=1; done
  return $status
}

run_lanes() {
  local gpus="" line fields words=() status=0
  while read -r line; do
    case "$line" in
    "" | "#"*) ;;
    "lane "* | wait)
      [ -n "$gpus" ] && start_lane "$gpus" "${words[@]}"
      gpus="" words=()
      if [ "$line" = wait ]; then wait_for_lanes || status=1; else gpus=${line#lane }; fi
      ;;
    *) read -ra fields <<<"$line" && words+=("${fields[@]}" --) ;;
    esac
  done <"$1"
  [ -n "$gpus" ] && start_lane "$gpus" "${words[@]}"
  wait_for_lanes || status=1
  tail -n 30 "$BENCH"/lane-*/work/lane-*.log
  return $status
}

save_logs() {
  (cd "$BENCH" && find . \( -path '*/work/*.log' -o -path '*/work/*.jsonl' \) -print0 | tar czf "$OUT/logs.tgz" --null -T -)
}

# what is installed: a machine that is still warm from a visit with the same has nothing to install
stamp() {
  {
    echo "$COMMIT"
    cd "$SOURCE" && find verl_sync_plugin cpu_stack configs setup.py pyproject.toml -type f ! -name '*.pyc' -exec sha256sum {} + | sort
    find "$PAYLOAD" -name '*.*xz' -exec sha256sum {} + | sort
  } | sha256sum
}
STAMP=$(stamp)
WARM=
[ "$(cat "$SITE/.stamp" 2>/dev/null)" = "$STAMP" ] && WARM=1
if [ -z "$WARM" ]; then
  rm -f "$SITE/.stamp"
  bash "$PAYLOAD/scripts/install.sh" "$PAYLOAD" || exit 1
  for file in verl/trainer/main_ppo.py sglang/launch_server.py; do
    [ -f "$SITE/$file" ] || { echo "the payload was not unpacked whole: $SITE/$file is missing" >&2 && exit 1; }
  done
  [ ! -f "$PAYLOAD/bridge.txz" ] || { mkdir -p "$BRIDGE_SITE" && tar xJf "$PAYLOAD/bridge.txz" -C "$BRIDGE_SITE"; } || exit 1
fi
. /tmp/s/env.sh
# of an earlier visit only the models stay, which are complete or made again
mkdir -p "$BENCH" && find "$BENCH" -path '*/model-*' -prune -o -type f -exec rm -f {} +
# the probe must be importable in every process, and nothing else of the checkout: its folders would shadow packages
cp -r benchmarks "$BENCH/"
export PYTHONPATH=$BENCH:$PYTHONPATH
[ "$1" = --lanes ] && cp "$2" "$BENCH/lanes" && set -- --lanes "$BENCH/lanes"
cd /tmp || exit 1
if [ -z "$WARM" ]; then
  (cd "$SOURCE" && install_package) || exit 1
  # the payload comes without bytecode, and every process of a run imports thousands of modules
  env -u PYTHONDONTWRITEBYTECODE python3 -m compileall -q -j 0 "$SITE" >/dev/null 2>&1
  echo "$STAMP" >"$SITE/.stamp"
fi
check_package || exit 1
unset PYTHONDONTWRITEBYTECODE
echo "installed after $SECONDS s"
trap save_logs EXIT

if [ "$1" = --lanes ]; then
  run_lanes "$2"
else
  run_cases "$@"
fi
