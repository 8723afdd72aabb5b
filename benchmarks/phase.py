# SPDX-License-Identifier: Apache-2.0
"""Measures one case: the same training under stock verl (at its defaults, and tuned) and under the plugin, in turn.

``python -m benchmarks.phase --case headline-7b-fsdp2 --model-size 7b --gpus 2 --strategy fsdp2
--rollout-tp 2 --steps 6 --out results.json``

phase = the rollout's sleep + the trainer's whole ``update_weights`` call, the slowest rank's, by the same clock for
both variants: what a variant moves from one stage into another stays in the sum.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import common, gauges, models
from benchmarks.common import STAGES, VARIANTS, command_line


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        model_size: a key of ``models.SHAPES``.
        lora_rank: 0 trains all parameters; otherwise LoRA, merged for the sync.
        steps: training steps, which is also how many syncs are measured.
        bucket_mb: 0 leaves every variant its own default.
        extra, plugin_extra: further Hydra overrides, for all variants and for the plugin alone.
        train_etp: 0 is verl's default, the tensor parallel size.
        rollout_gpus: devices that the rollout has for itself; 0 where it shares those of the trainer.
        prompt_tokens, response_tokens: of every sample; random models hardly ever end a response early.
    """

    name: str
    model_size: str
    gpus: int
    strategy: str
    rollout_tp: int
    train_tp: int
    train_pp: int
    lora_rank: int
    steps: int
    bucket_mb: int
    device: str
    extra: tuple[str, ...] = ()
    plugin_extra: tuple[str, ...] = ()
    train_vpp: int = 1
    train_cp: int = 1
    train_ep: int = 1
    train_etp: int = 0
    rollout_gpus: int = 0
    prompt_tokens: int = 40
    response_tokens: int = 64


@dataclass(frozen=True)
class Paths:
    """Where a run finds its model, prompts and reward."""

    model: Path
    prompts: Path
    reward: Path = Path(__file__).resolve().parent / "reward.py"


PROMPTS, RESPONSES = {"cpu": 4, "cuda": 16}, {"cpu": 2, "cuda": 4}  # per step, and per prompt
LEAST_SYNCS = 3  # of a run that its time limit ended: then they count, and its exit status is in its settings


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = common.parser_of("phase", __doc__)
    parser.add_argument("--model-size", choices=sorted(models.SHAPES), required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--strategy", choices=("fsdp", "fsdp2", "megatron"), default="fsdp2")
    parser.add_argument("--rollout-tp", type=int, default=1)
    help_of_own = "its own, in addition to --gpus; stock is then verl's engine nccl"
    parser.add_argument("--rollout-gpus", type=int, default=0, help=help_of_own)
    for axis, default in (("tp", 1), ("pp", 1), ("vpp", 1), ("cp", 1), ("ep", 1), ("etp", 0)):
        parser.add_argument(f"--train-{axis}", type=int, default=default, help="Megatron only")
    parser.add_argument("--lora-rank", type=int, default=0, help="0: full parameters; else LoRA with lora.merge=True")
    parser.add_argument("--steps", type=int, default=3, help="training steps; each gives one measured sync")
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--response-tokens", type=int, default=64)
    parser.add_argument("--bucket-mb", type=int, default=0, help="0: every variant's own default")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument(
        "--timeout", type=float, default=270.0, help=f"seconds per run; then it is ended, and needs {LEAST_SYNCS} syncs"
    )
    parser.add_argument("--budget", type=float, help="seconds for all runs together; a run starts only with 60 s left")
    parser.add_argument("--override", action="append", default=[], help="a Hydra override for all variants")
    help_of_ours = "one for the plugin alone: stock refuses the plugin's keys"
    parser.add_argument("--plugin-override", action="append", default=[], help=help_of_ours)
    args = parser.parse_args(argv)
    args.variants = args.variants.split(",")
    if bool(args.rollout_gpus) != args.case.startswith("separate-"):
        parser.error(f"--case {args.case}: names of cases with --rollout-gpus, and no others, begin with separate-")
    unknown = [name for name in args.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"unknown variants {unknown}; choose from {', '.join(VARIANTS)}")
    if args.strategy == "megatron" and "-bridge" not in args.case:  # gpu_visit.sh goes by the name
        parser.error(f"--case {args.case}: with --strategy megatron the name has -bridge in it, as in x-bridge-y")
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    return args


def case_of(args: argparse.Namespace) -> Case:
    """The case that the command line describes."""
    values = vars(args)
    fields = {field.name for field in dataclasses.fields(Case)} - {"name", "extra", "plugin_extra"}
    extra, ours = tuple(args.override), tuple(args.plugin_override)
    return Case(name=args.case, extra=extra, plugin_extra=ours, **{name: values[name] for name in fields})


_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_SGLANG = f"+{_ROLLOUT}.engine_kwargs.sglang"
_SHARES = {"7b": 0.4, "moe-8b": 0.2, "moe-19k": 0.35, "mla-7b": 0.2}  # of the device's memory, for the engine
PROBE = "benchmarks.probe"
LOCAL_MEGATRON = "benchmarks.local_megatron"


def _trainer(case: Case) -> list[str]:
    """The overrides of the trainer."""
    if case.strategy != "megatron":
        return [f"{_ACTOR}.strategy={case.strategy}"]
    megatron, reference = f"{_ACTOR}.megatron", "actor_rollout_ref.ref.megatron"
    transformer = f"{megatron}.override_transformer_config"
    sizes = {
        "tensor_model_parallel_size": (case.train_tp, 0),
        "pipeline_model_parallel_size": (case.train_pp, 0),
        "virtual_pipeline_model_parallel_size": (case.train_vpp, 1),
        "context_parallel_size": (case.train_cp, 1),
        "expert_model_parallel_size": (case.train_ep, 1),
        "expert_tensor_parallel_size": (case.train_etp, 0),
    }
    # Megatron's own norm, which is all there is without TransformerEngine, refuses sequence parallelism
    off = (
        "gradient_accumulation_fusion", "persist_layer_norm", "masked_softmax_fusion", "bias_dropout_fusion",
        "bias_activation_fusion", "moe_permute_fusion", "moe_router_fusion", "moe_shared_expert_overlap",
        "cross_entropy_loss_fusion", "sequence_parallel",
    )  # fmt: skip
    return f"""
        model_engine=megatron
        {" ".join(f"{megatron}.{key}={size}" for key, (size, default) in sizes.items() if size != default)}
        {megatron}.vanilla_mbridge=False
        {megatron}.use_remove_padding=False {reference}.use_remove_padding=False
        {megatron}.sequence_parallel=False {reference}.sequence_parallel=False
        ++{transformer}.attention_backend=unfused ++{transformer}.apply_rope_fusion=False
        +{transformer}.transformer_impl=local {" ".join(f"+{transformer}.{key}=False" for key in off)}
        {f"+{transformer}.use_cpu_initialization=True" if case.device == "cpu" else ""}
    """.split()


def _common(case: Case, paths: Paths) -> list[str]:
    batch = PROMPTS[case.device]
    return f"""
        algorithm.adv_estimator=grpo
        data.train_files={paths.prompts} data.val_files={paths.prompts} data.train_batch_size={batch}
        data.max_prompt_length={max(case.prompt_tokens, 128)} data.max_response_length={case.response_tokens}
        data.filter_overlong_prompts=False data.dataloader_num_workers=0
        {_MODEL}.path={paths.model} {_MODEL}.use_remove_padding=False
        +{_MODEL}.override_config.attn_implementation=sdpa
        {_ACTOR}.ppo_mini_batch_size={batch} {_ACTOR}.ppo_micro_batch_size_per_gpu={batch // 2}
        {_ACTOR}.use_kl_loss=False
        {_ROLLOUT}.name=sglang {_ROLLOUT}.tensor_model_parallel_size={case.rollout_tp}
        {_ROLLOUT}.n={RESPONSES[case.device]} {_ROLLOUT}.log_prob_micro_batch_size_per_gpu={batch // 2}
        {_SGLANG}.sampling_backend=pytorch
        reward.custom_reward_function.path={paths.reward} reward.custom_reward_function.name=compute_score
        reward.num_workers=1
        trainer.n_gpus_per_node={case.gpus} trainer.nnodes=1 trainer.total_training_steps={case.steps}
        trainer.total_epochs=1 trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1
        trainer.logger=["console"]
    """.split()


def _cuda(case: Case) -> list[str]:
    return f"""
        {_ACTOR}.optim.lr=1e-6
        {_ROLLOUT}.gpu_memory_utilization={_SHARES.get(case.model_size, 0.3)} {_ROLLOUT}.agent.num_workers=2
        {_SGLANG}.attention_backend=triton {_SGLANG}.grammar_backend=none
        {_SGLANG}.disable_piecewise_cuda_graph=True {_SGLANG}.cuda_graph_bs=[1,4,16,64]
        transfer_queue.backend.SimpleStorage.num_data_storage_units=2
        {f"{_SGLANG}.disable_custom_all_reduce=True" if case.rollout_tp > 1 else ""}
    """.split()


def _cpu(case: Case) -> list[str]:
    return f"""
        {_ACTOR}.optim.lr=1e-2 {_ACTOR}.use_torch_compile=False {_MODEL}.enable_gradient_checkpointing=False
        {_ROLLOUT}.gpu_memory_utilization=0.1 {_ROLLOUT}.enforce_eager=True {_ROLLOUT}.max_num_seqs=16
        {_ROLLOUT}.agent.num_workers=1 {_ROLLOUT}.load_format=auto
        {_SGLANG}.device=cpu {_SGLANG}.attention_backend=torch_native {_SGLANG}.enable_memory_saver=False
        {_SGLANG}.disable_overlap_schedule=True {_SGLANG}.max_total_tokens=8192 {_SGLANG}.log_level=warning
        transfer_queue.backend.SimpleStorage.num_data_storage_units=1
        trainer.device=cpu ray_kwargs.ray_init.num_cpus=16
        +ray_kwargs.ray_init.num_gpus={case.gpus + case.rollout_gpus} +ray_kwargs.ray_init.include_dashboard=False
    """.split()


def _lora(case: Case) -> list[str]:
    # verl's two trainers read these from different keys
    rank, alpha = ("lora.rank", "lora.alpha") if case.strategy == "megatron" else ("lora_rank", "lora_alpha")
    size = case.lora_rank
    return [f"{_MODEL}.{rank}={size}", f"{_MODEL}.{alpha}={size}", f"{_MODEL}.lora.merge=True"] if size else []


def _bucket(case: Case, variant: str) -> list[str]:
    # the short key is the plugin's; stock verl 0.9 refuses it
    folder = "" if variant == "plugin" else "checkpoint_engine."
    return [f"{_ROLLOUT}.{folder}update_weights_bucket_megabytes={case.bucket_mb}"] if case.bucket_mb else []


def _separate(case: Case, variant: str) -> list[str]:
    if not case.rollout_gpus:
        return []
    return f"""
        trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=1
        trainer.v1.separate_async.num_warmup_batches=1
        {_ROLLOUT}.nnodes=1 {_ROLLOUT}.n_gpus_per_node={case.rollout_gpus}
        {_ROLLOUT}.checkpoint_engine.backend={"sync_plugin" if variant == "plugin" else "nccl"}
    """.split()


def training_command(case: Case, variant: str, paths: Paths) -> list[str]:
    """The command of one run."""
    device = _cpu(case) if case.device == "cpu" else _cuda(case)
    overrides = [
        *_common(case, paths),
        *device,
        *_trainer(case),
        *_lora(case),
        *_bucket(case, variant),
        *_separate(case, variant),
        *case.extra,
        *(case.plugin_extra if variant == "plugin" else ()),
    ]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]


def training_environment(case: Case, variant: str, probe_file: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of one run: ``base``, the probe, and the plugin for that variant alone."""
    env = dict(base)
    # the plugin's own report goes into the same file
    env.update(SYNC_PROBE_FILE=str(probe_file), VERL_SYNC_REPORT_FILE=str(probe_file))
    env.update(RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0", HYDRA_FULL_ERROR="1")
    # Where the machine's memory grows as it is used, its total starts small, and Ray's monitor, which reads that, would
    # kill healthy runs.
    env["RAY_memory_monitor_refresh_ms"] = "0"
    ours = [PROBE, LOCAL_MEGATRON] if case.strategy == "megatron" and case.device == "cuda" else [PROBE]
    modules = [name for name in env.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if name and name not in ours]
    env["VERL_USE_EXTERNAL_MODULES"] = ",".join([*modules, *ours])
    for name in ("TMS_RETAIN_CPU_BACKUP", "VERL_USE_EXTERNAL_PLUGINS", "SGLANG_PLUGINS"):
        env.pop(name, None)
    if variant == "tuned":
        env["TMS_RETAIN_CPU_BACKUP"] = "1"
    if variant != "plugin":
        # both hosts discover entry points; "none" is the first's word, and for the second a name nobody has
        env.update(VERL_USE_EXTERNAL_PLUGINS="none", SGLANG_PLUGINS="none")
    if case.device == "cpu":
        env.update(VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda", SGLANG_USE_CPU_ENGINE="1")
        env.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(index) for index in range(case.rollout_tp))
        if case.strategy == "megatron":
            env["VERL_CPU_MCORE"] = "1"
    return env


STOCK_ADAPTER = "ServerAdapter"
# what the plugin may move between its calls, so that only its own report can split it
REPORTED = ("resume_weights", "update_weights", "resume_kv")
# the plugin's names for the ends of the stages inside the trainer's call
MOMENTS = {"weights": "resume_weights", "synced": "update_weights", "awake": "resume_kv"}
Record = dict[str, Any]


class ProbeError(ValueError):
    """A probe file that no phase can be computed from."""


@dataclass
class Sync:
    """One sync over all ranks: the largest number of any.

    Attributes:
        stages: seconds per stage; split by the plugin's report where there is one.
        outer: seconds by the probe's own clock around the calls, ``call`` being the trainer's whole ``update_weights``.
        report: the numbers of the plugin's own report; empty for stock verl.
        device_used_bytes: device memory in use by all processes after each stage.
    """

    stages: dict[str, float]
    outer: dict[str, float]
    bytes: int | None
    peak_device_bytes: int | None
    peak_host_bytes: int
    report: dict[str, float] = field(default_factory=dict)
    device_used_bytes: dict[str, int] = field(default_factory=dict)


def read_records(path: Path) -> list[Record]:
    """The records of a probe file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _stage(record: Record) -> str | None:
    event = record["event"]
    if event == "resume":
        return {"weights": "resume_weights", "kv_cache": "resume_kv"}.get(",".join(record.get("tags") or ()))
    return {"sync": "call", "sleep": "sleep", "update_weights": "update_weights"}.get(event)


def _in_order(records: Iterable[Record]) -> dict[str, dict[int, list[Record]]]:
    """Records by stage and rank, each list in the order of time: the n-th of a rank belongs to the n-th sync."""
    found: dict[str, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in sorted(records, key=lambda item: float(item.get("t", 0.0))):
        stage = _stage(record)
        if stage is not None and record.get("ok", True):
            found[stage][int(record["rank"])].append(record)
    for rank, updates in found["update_weights"].items():
        found["update_weights"][rank] = _joined_in_calls(updates, found["call"].get(rank, []))
    return found


def _joined_in_calls(updates: list[Record], calls: list[Record]) -> list[Record]:
    """One ``update_weights`` per trainer's call: with an adapter that the engine serves, verl's first sync has two."""
    joined: dict[Any, Record] = {}
    for position, record in enumerate(updates):
        around = (call["start"] for call in calls if 0 <= record["start"] - call["start"] <= call["seconds"])
        key = next(around, ("alone", position))
        before = joined.get(key)
        joined[key] = record if before is None else {**record, "seconds": before["seconds"] + record["seconds"]}
        if before is not None and "nbytes" in before:
            joined[key]["nbytes"] = before["nbytes"] + record.get("nbytes", 0)
    return list(joined.values())


def reports_of(records: Iterable[Record]) -> list[list[Record]]:
    """The plugin's reports sync by sync; every replica's leader writes one, with the weight version it delivered."""
    by_version: dict[Any, list[Record]] = defaultdict(list)
    for position, record in enumerate(records):
        if record["event"] == "sync_report":
            version = record.get("global_steps", -1)
            by_version[("unversioned", position) if version == -1 else version].append(record)
    return list(by_version.values())


def _nth(by_rank: dict[int, list[Record]], index: int) -> list[Record]:
    return [records[index] for records in by_rank.values() if index < len(records)]


def largest(records: Iterable[Record], key: str) -> Any:
    """The largest number that any record has under a key; ``None`` where none has it."""
    values = [record[key] for record in records if record.get(key) is not None]
    return max(values) if values else None


def _reported_stages(reports: list[Record]) -> dict[str, float]:
    said = [report.get("stages") or {} for report in reports]
    found = {name: largest(said, name) for name in REPORTED}
    return {name: round(float(seconds), 6) for name, seconds in found.items() if seconds is not None}


def report_numbers(reports: list[Record]) -> dict[str, float]:
    """The numbers of the plugin's reports of one sync, the largest of all."""
    flat = [
        {**report, **{f"stage/{name}": s for name, s in (report.get("stages") or {}).items()}} for report in reports
    ]
    names = {name for report in flat for name, value in report.items() if isinstance(value, int | float)}
    return {name: largest(flat, name) for name in sorted(names)}


def _device_used(parts: dict[str, list[Record]], reports: list[Record]) -> dict[str, int]:
    """Device memory in use by all processes after each stage, on the device that used most.

    The probe sees it at the end of each stage call; the plugin resumes inside ``update_weights``, so its report, where
    there is one, says more exactly when.
    """
    used = {name: largest(records, "device_used_bytes") for name, records in parts.items()}
    for moment, name in MOMENTS.items():
        said = [(report.get("device_used_bytes") or {}).get(moment) for report in reports]
        if known := [value for value in said if value is not None]:
            used[name] = max(known)
    return {name: int(value) for name, value in used.items() if value is not None}


def _sync(found: dict[str, dict[int, list[Record]]], index: int, sleeps_first: bool, reports: list[Record]) -> Sync:
    calls = _nth(found["call"], index)
    parts = {name: _nth(found[name], index) for name in ("resume_weights", "update_weights", "resume_kv")}
    sleep_index = index if sleeps_first else index - 1
    parts["sleep"] = _nth(found["sleep"], sleep_index) if sleep_index >= 0 else []
    outer = {name: round(float(largest(records, "seconds") or 0.0), 6) for name, records in parts.items()}
    outer["call"] = round(float(largest(calls, "seconds")), 6)
    phase = round(outer["sleep"] + outer["call"], 6)
    delivered = largest([*reports, *parts["update_weights"]], "nbytes")
    return Sync(
        stages={**{name: outer[name] for name in parts}, **_reported_stages(reports), "phase": phase},
        outer=outer,
        bytes=delivered,
        peak_device_bytes=largest(calls, "peak_device_bytes"),
        peak_host_bytes=int(largest(calls, "rss_peak_bytes") or 0),
        report=report_numbers(reports),
        device_used_bytes=_device_used(parts, reports),
    )


def syncs(records: Iterable[Record]) -> list[Sync]:
    """All syncs of a run in order; the first is the one at start, a warm-up.

    A sync needs the whole call of every rank; a run cut short in the middle of one does not count it.

    Raises:
        ProbeError: no sync is complete, or ranks disagree by more than the one cut short.
    """
    records = list(records)
    found, reports = _in_order(records), reports_of(records)
    counts = {rank: len(calls) for rank, calls in found["call"].items()}
    if not counts:
        raise ProbeError("no complete sync in the probe file: did verl load benchmarks.probe, and training start?")
    if max(counts.values()) - min(counts.values()) > 1:
        raise ProbeError(f"ranks recorded different numbers of syncs: {counts}")
    first_call = min(calls[0]["start"] for calls in found["call"].values())
    first_sleep = min((sleeps[0]["start"] for sleeps in found["sleep"].values()), default=None)
    sleeps_first = first_sleep is not None and first_sleep < first_call
    reports += [[]] * max(counts.values())  # stock verl writes none
    return [_sync(found, index, sleeps_first, reports[index]) for index in range(min(counts.values()))]


def check_cut_short(records: list[Record], ended: float, least: int) -> None:
    """Raises ProbeError, with the reason, where a run that was ended from outside does not count: it must have gone on
    well until then, at ``ended`` in seconds since the epoch, with ``least`` measured syncs."""
    if not all(record.get("ok", True) for record in records):
        raise ProbeError("a call failed before the time limit")
    done = sorted(record["t"] for record in records if record["event"] == "sync")
    complete = len(syncs(records)) - 1
    if complete < least:
        raise ProbeError(f"{complete} measured syncs within the time limit, fewer than {least}")
    longest = max(after - before for before, after in pairwise(done))
    if ended - done[-1] > 3 * longest:
        raise ProbeError(f"no sync in the last {ended - done[-1]:.0f} s before the time limit: the run stood still")


def adapter_classes(records: Iterable[Record]) -> set[str]:
    """The classes that delivered the weights: they tell which variant really ran."""
    return {str(record.get("class")) for record in records if record["event"] == "update_weights"}


def medians(measured: list[Sync]) -> dict[str, float]:
    """Median seconds per stage, from the third sync of the run on, as far as there is one.

    Raises:
        ProbeError: there is nothing to take a median of.
    """
    if not measured:
        raise ProbeError("no sync after the warm-up: the run needs at least one training step")
    measured = measured[1:] or measured
    return {name: round(statistics.median(sync.stages[name] for sync in measured), 6) for name in STAGES}


def separate_syncs(records: Iterable[Record]) -> list[Sync]:
    """All syncs of the separate rollout in order; the first is the one at start, a warm-up.

    Raises:
        ProbeError: there is none.
    """
    records = list(records)
    whole = [record for record in records if record["event"] == "whole" and record.get("backend") != "naive"]
    if not whole:
        raise ProbeError("no sync of a separate rollout in the probe file")
    reports = reports_of(record for record in records if str(record.get("manager")).startswith("Separate"))
    reports += [[]] * len(whole)  # stock verl writes none
    calls = sorted(whole, key=lambda record: float(record["start"]))
    return [_separate_sync(call, records, said) for call, said in zip(calls, reports, strict=False)]


def _separate_sync(call: Record, records: list[Record], reports: list[Record]) -> Sync:
    begin, end = float(call["start"]), float(call["start"]) + float(call["seconds"])
    inside = [record for record in records if begin <= float(record.get("start") or 0.0) <= end]
    trainers = [record for record in inside if record["event"] == "sync"]
    rollouts = [record for record in inside if record["event"] == "update_weights"]
    ranks = trainers + rollouts
    outer = {"call": round(float(call["seconds"]), 6)}
    for name, found in (("trainer", trainers), ("rollout", rollouts)):
        outer[name] = round(float(largest(found, "seconds") or 0.0), 6)
    outer["paused"] = round(_paused(inside), 6)
    stages = dict.fromkeys(("sleep", "resume_weights", "resume_kv"), 0.0)
    return Sync(
        stages={**stages, "update_weights": max(outer["trainer"], outer["rollout"]), "phase": outer["call"]},
        outer=outer,
        bytes=largest([*reports, *ranks], "nbytes"),
        peak_device_bytes=largest(ranks, "peak_device_bytes"),
        peak_host_bytes=int(largest(ranks, "rss_peak_bytes") or 0),
        report=report_numbers(reports),
    )


def _paused(inside: list[Record]) -> float:
    """Seconds of the server that is paused longest."""
    longest = 0.0
    for server in {record["pid"] for record in inside if record["event"] == "stop"}:
        own = [record for record in inside if record["pid"] == server]
        stopped = min(float(record["start"]) for record in own if record["event"] == "stop")
        went_on = [float(record["start"]) + float(record["seconds"]) for record in own if record["event"] == "go_on"]
        longest = max([longest, *(end - stopped for end in went_on)])
    return longest


_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def printed(log: Path, name: str) -> list[float]:
    """A metric of verl's own by step; its ``timing_s/...`` are a second clock, independent of the probe."""
    text = _ANSI.sub("", log.read_text(encoding="utf-8", errors="replace"))
    return [float(value) for value in re.findall(rf"{name}:([0-9.eE+-]+)", text)]


def summarize(variant: str, settings: dict[str, Any], probe_file: Path, log: Path) -> dict[str, Any]:
    """One entry of ``runs``, from the files that the run left.

    Raises:
        ProbeError: the probe file is incomplete, or shows the other variant: verl drops a plugin that fails to load.
    """
    records = read_records(probe_file)
    first, *measured = (separate_syncs if settings.get("rollout_gpus") else syncs)(records)
    stock = adapter_classes(records) == {STOCK_ADAPTER}
    if stock == (variant == "plugin"):
        raise ProbeError(f"not a {variant} run: weights came from {sorted(adapter_classes(records))}")
    return {
        "variant": variant,
        "settings": settings,
        "stages": medians(measured),
        "samples": {
            "first_sync": dataclasses.asdict(first),
            "syncs": [dataclasses.asdict(sync) for sync in measured],
            "verl_update_weights_s": printed(log, "timing_s/update_weights"),
            "verl_step_s": printed(log, "timing_s/step"),
            "probs_correlation": printed(log, "rollout_actor_probs_pearson_corr"),
            "host_used_bytes": [record["host_used_bytes"] for record in records if record.get("host_used_bytes")],
        },
        "bytes": max(filter(None, [sync.bytes for sync in (first, *measured)]), default=None),
        "peak_device_bytes": max(filter(None, [sync.peak_device_bytes for sync in measured]), default=None),
        "peak_host_bytes": max(sync.peak_host_bytes for sync in measured),
    }


ROWS_PER_STEP = 16
LEAST_RUN_SECONDS = 60.0


def prepare(case: Case, work: Path) -> Paths:
    """Makes the case's prompts, and the model where there is none whole, in a process whose device memory goes back."""
    paths = Paths(model=work / f"model-{case.model_size}", prompts=work / "prompts.parquet")
    # another case may have left prompts for fewer steps, and its run would end early
    models.write_prompts(paths.prompts, ROWS_PER_STEP * (case.steps + 1), case.prompt_tokens)
    if (paths.model / models.DONE).exists():
        return paths
    build = [sys.executable, "-m", "benchmarks.models", "--size", case.model_size, "--out", str(paths.model)]
    build += ["--device", case.device]
    # transformers imports torchvision, whose compiled part needs the CPU stack's help to load without CUDA
    platform = {"VERL_PLATFORM": "cpu"} if case.device == "cpu" else {}
    subprocess.run(build, env={**os.environ, **platform}, check=True)
    return paths


def _importable(work: Path) -> Path:
    """A folder from which every process of the training can import the probe, and nothing else of the checkout."""
    folder = work / "importable"
    folder.mkdir(exist_ok=True)
    link = folder / "benchmarks"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(__file__).resolve().parent)
    return folder


def run_variant(
    case: Case,
    variant: str,
    paths: Paths,
    work: Path,
    timeout: float,
    idle: bool = True,
) -> dict[str, Any] | None:
    """Runs and summarizes one training; None, with the end of its log on stderr, when it failed.

    ``idle``: whether the devices are waited for until nothing else holds their memory.
    """
    stem = f"{case.name}-{variant}"
    probe_file, log = work / f"{stem}.jsonl", work / f"{stem}.log"
    probe_file.unlink(missing_ok=True)
    if case.device == "cuda" and idle and not common.wait_until_idle():
        print("warning: device memory is still in use; the run may lack memory", file=sys.stderr)
    line, host = training_command(case, variant, paths), gauges.host_used_bytes()
    env = training_environment(case, variant, probe_file, os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_importable(work)), env.get("PYTHONPATH"))))
    env["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="triton-", dir=work)  # cold, for every variant alike
    print(f"[{stem}] {shlex.join(line)}", flush=True)
    status, seconds = common.run_command(line, env, log, timeout, work)
    print(f"[{stem}] status {status} after {seconds:.0f} s", flush=True)
    settings = {**dataclasses.asdict(case), "exit_status": status, "run_seconds": round(seconds, 1)}
    settings |= {"counted_from": 3, "host_before_bytes": host}
    try:
        if status not in (0, common.TIMED_OUT):
            raise ProbeError(f"exit status {status}")
        if status == common.TIMED_OUT:
            check_cut_short(read_records(probe_file), time.time(), LEAST_SYNCS)
        return summarize(variant, settings, probe_file, log)
    except (ProbeError, OSError, ValueError) as error:
        tail = log.read_text(encoding="utf-8", errors="replace")[-6000:] if log.exists() else ""
        print(f"[{stem}] FAILED: {error}\n{tail}", file=sys.stderr, flush=True)
        return None


def measure(case: Case, args: argparse.Namespace, work: Path) -> int:
    """Runs every variant and writes the result after each; returns how many runs failed."""
    end = time.monotonic() + args.budget if args.budget else None
    paths = prepare(case, work)
    rate = common.link_bytes_per_second() if case.rollout_gpus and case.device == "cuda" else None
    runs: list[dict[str, Any]] = []
    failed = 0
    for variant in args.variants:
        limit = args.timeout if end is None else min(args.timeout, end - time.monotonic())
        if limit < LEAST_RUN_SECONDS:
            print(f"no time left for {variant}", file=sys.stderr, flush=True)
            failed += 1
            continue
        run = run_variant(case, variant, paths, work, limit)
        if run is None:
            failed += 1
            continue
        runs.append(run)
        print(json.dumps({"case": case.name, "variant": variant, "stages": run["stages"]}), flush=True)
        result = common.result_of(case.name, command_line("phase", args), runs)
        if rate is not None:
            result["machine"]["link_bytes_per_second"] = rate
        common.write_result(args.out, result)
    return failed


def main(argv: list[str] | None = None) -> int:
    """Measures the case; returns 1 when a run failed, after writing what did succeed."""
    args = arguments(argv)
    return 1 if measure(case_of(args), args, common.work_of(args)) else 0


if __name__ == "__main__":
    sys.exit(main())
