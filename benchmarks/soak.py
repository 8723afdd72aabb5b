# SPDX-License-Identifier: Apache-2.0
"""Many syncs in a row: whether memory, open files, threads or the time of a sync grow.

``python -m benchmarks.soak --model dense-1p8b --syncs 200 --out results.json``

Every sync brings other weights than the one before. Exit status 1 says that something grew by more than ``ALLOWED``, or
that the engine no longer generates what it did at the start for the same weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from benchmarks import common, gauges, models, transfer
from benchmarks.common import command_line
from benchmarks.models import SHAPES
from benchmarks.transfer import ADAPTER, Client, Plugin, Server, ServerEndpoint, one_rank

MIB = 2**20
EARLY = (0.1, 0.35)
LATE = (0.75, 1.0)
# Allowed growth between the windows. One bucket kept per sync is far more than any of these; a leak of 130 kB per sync
# in Python objects reaches 16 MiB within the 130 syncs between them.
# Per process: resident memory, a socket that is about to be closed, a pool that has not yet reached its size, staging
# memory, which is one piece for the whole run; "rollout" is the rollout rank of a separate rollout.
_PROCESS = {"rss_bytes": 16 * MIB, "fds": 2, "threads": 2, "shared_bytes": 0}
ALLOWED: dict[str, float] = {
    "device_used_bytes": 64 * MIB,  # CUDA's own pools grow in steps
    "trainer.torch_allocated_bytes": 1 * MIB,
    "trainer.torch_reserved_bytes": 32 * MIB,  # the allocator's larger segments
    **{f"{kind}.{name}": much for kind in ("trainer", "schedulers", "rollout") for name, much in _PROCESS.items()},
}
# of the early seconds; without an accelerator the neighbours on the machine decide, so it is not looked at
ALLOWED_SECONDS_SHARE = 0.25


def _value(sample: dict[str, Any], name: str) -> float | None:
    part, _, key = name.rpartition(".")
    value = (sample.get(part, {}) if part else sample).get(key)
    return None if value is None else float(value)


def _window_median(samples: list[dict[str, Any]], name: str, window: tuple[float, float], syncs: int) -> float | None:
    first, last = window[0] * syncs, window[1] * syncs
    values = [_value(sample, name) for sample in samples if first <= sample["sync"] <= last]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def growth_of(samples: list[dict[str, Any]], syncs: int, device: str) -> dict[str, dict[str, float]]:
    """Early and late medians of everything that was sampled, and how much more late may be."""
    found = {}
    for name in (*ALLOWED, *(["seconds"] if device == "cuda" else [])):
        early, late = (_window_median(samples, name, window, syncs) for window in (EARLY, LATE))
        if early is not None and late is not None:
            found[name] = {"early": early, "late": late, "allowed": ALLOWED.get(name, early * ALLOWED_SECONDS_SHARE)}
    return found


def grown(growth: dict[str, dict[str, float]]) -> list[str]:
    """Names everything that grew by more than is allowed."""
    return [
        f"{name} grew from {found['early']:g} to {found['late']:g}, allowed are {found['allowed']:g} more"
        for name, found in growth.items()
        if found["late"] - found["early"] > found["allowed"]
    ]


SEPARATE = "separate-"
_COLOCATED = ("fsdp2", "fsdp2-lora", "fsdp2-lora-served", "megatron")
KINDS = ("plain", *_COLOCATED, *(SEPARATE + kind for kind in _COLOCATED))
SERVED = "-served"
RANK = 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TIMEOUT_SECONDS = 60.0
_LOCAL_LAYERS: dict[str, Any] = {
    "sequence_parallel": False, "attention_backend": "unfused",
    "gradient_accumulation_fusion": False, "bias_dropout_fusion": False, "apply_rope_fusion": False,
    "masked_softmax_fusion": False, "bias_activation_fusion": False, "persist_layer_norm": False,
    "moe_permute_fusion": False, "moe_router_fusion": False, "moe_shared_expert_overlap": False,
    "cross_entropy_loss_fusion": False, "transformer_impl": "local",
}  # fmt: skip


def server_options(kind: str, device: str) -> list[str]:
    """SGLang's arguments for a kind of trainer; on a GPU it chooses its own backend, as under verl."""
    if not kind.endswith(SERVED):
        return []
    backend = "--lora-backend torch_native" if device == "cpu" else ""
    return f"--enable-lora {backend} --max-lora-rank {RANK} --lora-target-modules {' '.join(TARGETS)}".split()


def engine(kind: str, model: str, folder: Path, device: str) -> Any:
    """verl's training engine with random weights of ``benchmarks.models.SHAPES``; one rank."""
    if device == "cuda":
        import torch

        torch.cuda.set_device(0)
        if "megatron" in kind:
            import benchmarks.local_megatron  # noqa: F401
    from verl.trainer.config import CheckpointConfig
    from verl.workers.engine import EngineRegistry

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", RAY_LOCAL_WORLD_SIZE="1")
    models.write_model(model, folder, device)
    strategy = "megatron" if "megatron" in kind else "fsdp2"
    parts = _megatron(folder, device) if strategy == "megatron" else _fsdp2(folder, kind)
    built = EngineRegistry.new("language_model", strategy, *parts, CheckpointConfig())
    built.initialize()
    return built


def _fsdp2(folder: Path, kind: str) -> tuple[Any, Any, Any]:
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    lora: dict[str, Any] = {}
    if "lora" in kind:
        lora = {"lora_rank": RANK, "target_modules": TARGETS, "lora": {"merge": not kind.endswith(SERVED)}}
    model = HFModelConfig(
        path=str(folder),
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
        **lora,
    )
    config = FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False)
    return model, config, FSDPOptimizerConfig(lr=1e-3, total_training_steps=10)


def _megatron(folder: Path, device: str) -> tuple[Any, Any, Any]:
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig

    config = McoreEngineConfig(
        sequence_parallel=False,
        vanilla_mbridge=False,
        use_mbridge=True,
        use_remove_padding=False,
        use_dynamic_bsz=False,
        override_ddp_config={"grad_reduce_in_fp32": False},  # nothing is trained, and so the MoE fits 80 GB
        override_transformer_config={
            **_LOCAL_LAYERS,
            **({"use_cpu_initialization": True} if device == "cpu" else {}),
        },
    )
    optimizer = McoreOptimizerConfig(lr=1e-3, lr_warmup_steps=0, total_training_steps=10)
    return HFModelConfig(path=str(folder), use_remove_padding=False), config, optimizer


class Turned:
    """The weights of an engine, which turn into others and back: its adapter's where it has one, else its head's."""

    def __init__(self, trained: Any) -> None:
        import torch

        modules = trained.module if isinstance(trained.module, list) else [trained.module]
        found = [(name, value) for module in modules for name, value in module.named_parameters()]
        adapted = [value for name, value in found if "lora_B" in name]
        named = dict(found)
        head = next(name for name in named if "lm_head" in name or "output_layer" in name)
        self._turned = [getattr(value, "_local_tensor", value).data for value in adapted or [named[head]]]
        generator = torch.Generator().manual_seed(1)
        for value in self._turned if adapted else []:
            value.copy_(torch.randn(value.shape, generator=generator))

    def turn(self) -> None:
        """At every second call they are what they were."""
        for value in self._turned:
            value.copy_(value.flip(0))


def colocated(trained: Any, server: Any, bucket_mb: int, device: str) -> Plugin:
    """The phase of a colocated trainer, by the sharding manager that a run of verl would have."""
    import torch

    from verl_sync_plugin.config.settings import SyncConfig
    from verl_sync_plugin.sharding_manager import get_sharding_manager
    from verl_sync_plugin.trainers.base import export_shards

    export_shards(True)
    stream, _ = trained.get_per_tensor_param()
    manager = get_sharding_manager(stream.trainer, "sglang")
    config = SyncConfig(timeout_seconds=TIMEOUT_SECONDS)
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    return Plugin(manager(trained, ServerEndpoint(server), config, bucket_mb << 20, where, "bfloat16"))


class Trained:
    """A training engine and a real server: what the soak asks of its rig (``transfer.Rig`` is the plain one).

    Attributes:
        nbytes, tensors: of the last sync.
        devices: the GPUs whose memory matters.
    """

    def __init__(self, kind: str, trained: Any, server: Server, bucket_mb: int, work: Path, device: str) -> None:
        self.server = server
        self._turned = Turned(trained)
        separate = kind.startswith(SEPARATE)
        given = (trained, server, bucket_mb, device)
        self.way: Any = Separate(*given, work) if separate else colocated(*given)
        self._adapter = ADAPTER if kind.endswith(SERVED) else ""
        self.devices = (0, 1) if separate and gauges.gpus() > 1 else (0,)
        self.nbytes = self.tensors = 0
        self.close = self.way.close

    def other_weights(self) -> None:
        """Turns the trainer's weights into others, and at the next call back into what they were."""
        import torch

        with torch.no_grad():
            self._turned.turn()

    def sync(self) -> dict[str, Any]:
        """One sync of the trainer's weights as they are; its report."""
        report: dict[str, Any] = self.way.sync()
        self.nbytes, self.tensors = report["nbytes"], report["tensors"]
        self.server.adapter = self._adapter  # the endpoint that loads it may be in another process
        return report

    def processes(self) -> dict[str, list[psutil.Process]]:
        """All whose growth matters."""
        found = {"trainer": [psutil.Process()], "schedulers": self.server.schedulers()}
        rollout = getattr(self.way, "process", None)
        return {**found, "rollout": [psutil.Process(rollout.pid)]} if rollout is not None else found


@contextmanager
def trained_rig(kind: str, model: str, bucket_mb: int, work: Path, device: str) -> Iterator[Trained]:
    """Starts the server and makes the training engine; ends every process below this one."""
    with one_rank(work, device):
        folder = work / model
        trained = engine(kind, model, folder, device)
        where = second_gpu(device) if kind.startswith(SEPARATE) else {}
        server = Server(folder, device, work / f"{model}-server.log", server_options(kind, device), where)
        try:
            yield Trained(kind, trained, server, bucket_mb, work, device)
        finally:
            server.stop()


VISIBLE = "CUDA_VISIBLE_DEVICES"
SYNC = {"timeout_seconds": TIMEOUT_SECONDS}


def second_gpu(device: str) -> dict[str, str]:
    """The environment of a process that sees nothing but the second of the visible GPUs, or the only one."""
    if device != "cuda":
        return {}
    import torch

    visible = os.environ.get(VISIBLE) or ",".join(map(str, range(torch.cuda.device_count())))
    return {VISIBLE: visible.split(",")[:2][-1]}


def receiving(server: Client, bucket_bytes: int, sync: dict[str, Any]) -> tuple[Any, Any]:
    """The rollout's end of a separate rollout: its checkpoint engine, and what verl's adapter does."""
    from verl_sync_plugin.config.settings import SyncConfig
    from verl_sync_plugin.hooks.separate import SyncCheckpointEngine
    from verl_sync_plugin.rollouts.adapter import SeparateReceiver
    from verl_sync_plugin.sync.separate import SeparateRollout
    from verl_sync_plugin.trainers.base import trainer_device

    def make(joint: Any, ranks: tuple[int, ...]) -> SeparateRollout:
        endpoint = ServerEndpoint(server, ranks=ranks)
        return SeparateRollout(joint, endpoint, SyncConfig.from_mapping(sync), trainer_device())

    return SyncCheckpointEngine(bucket_bytes, None, sync=sync, rollout="sglang"), SeparateReceiver(make).receive


def _rollout(pipe: Connection, server: Client, folder: str, bucket_bytes: int) -> None:
    """The rollout rank, as verl has one for each engine rank: answers calls until the pipe closes."""
    import torch.distributed as dist

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{os.getpid()}", rank=0, world_size=1)
    engine, receive = receiving(server, bucket_bytes, SYNC)
    while True:
        try:
            what, given = pipe.recv()
        except EOFError:
            return
        if what == "update_weights":
            answer = asyncio.run(receive(engine.receive_weights(**given), given["global_steps"]))
        else:
            answer = getattr(engine, what)(**given)
        pipe.send(answer)


class Separate:
    """The trainer's end of a separate rollout, in this process: makes verl's calls of every sync on both ends, which
    verl's driver makes through Ray. On GPUs the rollout computes on the second of those that are visible."""

    def __init__(self, trained: Any, server: Server, bucket_mb: int, device: str, folder: Path) -> None:
        from verl_sync_plugin.hooks.separate import SyncCheckpointEngine

        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._trained, self._version = trained, 0
        self._engine = SyncCheckpointEngine(bucket_mb << 20, True, sync=SYNC, rollout="sglang")
        given = (theirs, Client(server.port, server.model), str(folder), bucket_mb << 20)
        self.process = context.Process(target=_rollout, args=given, daemon=True)
        with patch.dict(os.environ, second_gpu(device)):
            self.process.start()
        theirs.close()

    def _both(self, what: str, ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[Any, Any]:
        """One call on both ends at the same time; its answers."""
        self._pipe.send((what, theirs))
        return getattr(self._engine, what)(**ours), self._pipe.recv()

    def sync(self) -> dict[str, Any]:
        """One sync, with the rounds of calls that verl makes around it; the plugin's report of it."""
        self._version += 1
        weights, _ = self._trained.get_per_tensor_param()
        members = self._both("prepare", {}, {})
        ours, theirs = (
            {name: each[0] for name, each in topology.items()}
            for topology in self._engine.build_topology(1, 1, list(members))
        )
        self._both("init_process_group", ours, theirs)
        version = {"global_steps": self._version}
        self._pipe.send(("update_weights", version))
        asyncio.run(self._engine.send_weights(weights, **version))
        self._pipe.recv()
        self._both("finalize", {}, {})
        manager = self._engine._manager
        assert manager is not None, "it has sent"
        return dict(manager.report.as_dict())

    def close(self) -> None:
        self._pipe.close()
        self.process.join(20)


Bench = transfer.Rig | Trained
HARNESS = "soak"
LEAST_SYNCS = 24


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = common.parser_of(HARNESS, __doc__)
    parser.add_argument("--model", choices=sorted(transfer.CONFIGS), required=True)
    parser.add_argument("--trainer", choices=KINDS, default="plain", help="plain: tensors in one process")
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--trainer-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--syncs", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="syncs between two samples")
    args = parser.parse_args(argv)
    args.case = args.case or f"soak-{args.model}"
    if args.trainer != "plain" and args.model not in SHAPES:
        parser.error(
            f"--trainer {args.trainer}: with --model {' or '.join(sorted(set(transfer.CONFIGS) & set(SHAPES)))}"
        )
    if args.syncs < LEAST_SYNCS or args.syncs % 2 or not 1 <= args.every <= args.syncs // 8:
        parser.error(f"--syncs: an even number from {LEAST_SYNCS} on; --every: at most an eighth of it")
    return args


def _process(process: psutil.Process) -> dict[str, int]:
    with process.oneshot():
        rss, threads = process.memory_info().rss, process.num_threads()
    shared = gauges.mapped_shared_bytes(process.pid)
    return {"rss_bytes": rss, "fds": process.num_fds(), "threads": threads, "shared_bytes": shared}


def sample(bench: Bench, number: int, seconds: list[float]) -> dict[str, Any]:
    """Reads the memory of trainer, schedulers and device after sync ``number``."""
    found: dict[str, Any] = {"sync": number, "seconds": round(statistics.median(seconds), 6)}
    used = [gauges.device_used_bytes(device) for device in bench.devices]
    found["device_used_bytes"] = sum(map(int, filter(None, used))) if any(used) else None
    for kind, processes in bench.processes().items():
        parts = [_process(process) for process in processes]
        found[kind] = {name: sum(part[name] for part in parts) for name in parts[0]}
    found["trainer"].update(gauges.torch_bytes())
    return found


def soak(args: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    """Runs the syncs; samples, and the tokens for the first weights and for others, at the start and at the end."""
    way: Any = bench
    if isinstance(bench, transfer.Rig):
        way = transfer.make_way("plugin", bench.server, bench.named, args.bucket_mb, args.device)
    samples: list[dict[str, Any]] = []
    tokens: dict[str, list[list[int]]] = {"first": [], "others": []}
    seconds: list[float] = []
    for number in range(1, args.syncs + 1):
        bench.other_weights()  # odd syncs bring others, even ones those of the start
        gauges.synchronize()
        started = time.perf_counter()
        way.sync()
        gauges.synchronize()
        seconds.append(time.perf_counter() - started)
        if number <= 2 or number > args.syncs - 2:
            tokens["others" if number % 2 else "first"].append(bench.server.tokens())
        if number == 1 or number % args.every == 0:
            samples.append(sample(bench, number, seconds[-args.every :]))
            print(json.dumps(samples[-1]), flush=True)
    way.close()
    return {"syncs": samples, "tokens": tokens, "growth": growth_of(samples, args.syncs, args.device)}


def problems(samples: dict[str, Any]) -> list[str]:
    """Lists growth, and weights that did not arrive."""
    first, others = samples["tokens"]["first"], samples["tokens"]["others"]
    found = grown(samples["growth"])
    if first[0] != first[-1] or others[0] != others[-1]:
        found.append(f"at the end the engine generates other tokens than at the start: {samples['tokens']}")
    if first[0] == others[0]:
        found.append(f"other weights make no difference: {first[0]}")
    return found


def run_of(args: argparse.Namespace, samples: dict[str, Any], bench: Bench) -> dict[str, Any]:
    """The one entry of ``runs``, in the form of ``schema``."""
    seconds = statistics.median(entry["seconds"] for entry in samples["syncs"])
    none = {"sleep": 0.0, "resume_weights": 0.0, "resume_kv": 0.0}
    settings = {
        "harness": HARNESS, "model": args.model, "bucket_mb": args.bucket_mb, "device": args.device,
        "tensors": bench.tensors, "trainer": args.trainer, "trainer_dtype": args.trainer_dtype,
        "floor_seconds": common.floor_seconds(bench.nbytes), "syncs": args.syncs, "every": args.every,
    }  # fmt: skip
    used = [entry["device_used_bytes"] for entry in samples["syncs"] if entry["device_used_bytes"] is not None]
    return {
        "variant": "plugin",
        "settings": settings,
        "stages": {**none, "update_weights": seconds, "phase": seconds},
        "samples": samples,
        "bytes": bench.nbytes,
        "peak_device_bytes": max(used, default=None),
        "peak_host_bytes": gauges.rss_peak_bytes(),
    }


def measure(args: argparse.Namespace, bench: Bench) -> int:
    """Runs the syncs and writes the result, whether or not something grew; returns the exit status."""
    samples = soak(args, bench)
    result = common.result_of(args.case, command_line("soak", args), [run_of(args, samples, bench)])
    common.write_result(args.out, result)
    found = problems(samples)
    for problem in found:
        print(f"[{args.case}] FAILED: {problem}", file=sys.stderr, flush=True)
    return 1 if found else 0


def main(argv: list[str] | None = None) -> int:
    """Measures one case; returns the exit status."""
    args = arguments(argv)
    work = common.work_of(args)
    if args.trainer != "plain":
        with trained_rig(args.trainer, args.model, args.bucket_mb, work, args.device) as trained:
            return measure(args, trained)
    with transfer.rig(args.model, args.device, args.trainer_dtype, work) as bench:
        return measure(args, bench)


if __name__ == "__main__":
    sys.exit(main())
