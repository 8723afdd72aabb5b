# SPDX-License-Identifier: Apache-2.0
"""The proof itself: reset, sync, compare, as often as asked for; then log-probabilities."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from verl_sync_plugin.cli.prove.logprobs import difference
from verl_sync_plugin.errors import RolloutError, SyncError
from verl_sync_plugin.report.sync_report import SyncReport
from verl_sync_plugin.rollouts import LOCAL, rollout_of
from verl_sync_plugin.spmd import oracles
from verl_sync_plugin.spmd.rollout import SpmdRollout

NAMED = 3  # parameters in a line
Digests = list[dict[str, str]]


@dataclass(frozen=True)
class Check:
    """One line of the result.

    Attributes:
        check: what was looked at.
        passed: it is as it should be.
        found: what was found.
        skipped: it could not be looked at here.
    """

    check: str
    passed: bool
    found: str
    skipped: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def prove(options: argparse.Namespace) -> list[Check]:
    """Runs all checks; what fails ends them, and is the last one. Collective where torchrun started several processes.

    Args:
        options: of the command line.
    """
    checks: list[Check] = []
    with _world():
        try:
            _prove(options, checks)
        except (RolloutError, SyncError) as error:
            checks.append(Check("the run", False, " ".join(str(error).split())))
    return checks


def _prove(options: argparse.Namespace, checks: list[Check]) -> None:
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = getattr(torch, options.trainer_dtype)
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    model.to(device)
    with SpmdRollout(
        options.model,
        tensor_parallel_size=options.tp,
        dtype=options.dtype,
        gpu_memory_utilization=options.gpu_memory_utilization,
        random_weights=False,
        sync={"verify": "always"},
        engine={"custom_weight_loader": [rollout_of(LOCAL).digest_loader]},
    ) as rollout:
        loaded = oracles.digests(rollout)
        sums = _checksums(rollout)
        if loaded is not None:
            checks.append(Check("SGLang's own load", True, f"{_count(loaded)} parameters of {len(loaded)} ranks"))
        if isinstance(sums, str):
            checks.append(Check("SGLang's checksums", True, f"digests of all parameters stand for them: {sums}", True))
        for number in range(1, options.syncs + 1):
            oracles.check_weights(rollout, "reset_tensors")
            checks += _reset(number, loaded, oracles.digests(rollout))
            report = rollout.sync_weights(model)
            checks += _synced(number, loaded, oracles.digests(rollout), report)
            if not isinstance(sums, str):
                checks += _same_sums(number, sums, _checksums(rollout))
        checks += _logprobs(options, rollout, model)


def _reset(number: int, loaded: Digests | None, now: Digests | None) -> list[Check]:
    """Nothing is left of what the engine held."""
    if loaded is None or now is None:
        return []
    kept = _compared(loaded, now, lambda before, after: before == after)
    found = f"random numbers in all {_count(now)} parameters" if not kept else f"unchanged: {_shown(kept)}"
    return [Check(f"reset {number}", not kept, found)]


def _synced(number: int, loaded: Digests | None, now: Digests | None, report: SyncReport) -> list[Check]:
    """Every parameter is again what SGLang's own load of the checkpoint makes of it, and the sync's own proof holds."""
    way = "in place" if report.direct_bytes else ("replayed" if report.replayed_tensors else "the engine's own load")
    said = f"{report.verified_tensors} tensors compared in the engine, {report.not_comparable} not comparable"
    own = Check(f"sync {number}, its own proof", report.verified_tensors > 0, said)
    if loaded is None or now is None:
        return [own]
    other = _compared(loaded, now, lambda before, after: before != after)
    found = f"all {_count(now)} parameters as SGLang loads them itself" if not other else f"other: {_shown(other)}"
    return [Check(f"sync {number} ({way})", not other, f"{found}; {report.phase_seconds:.2f} s"), own]


def _checksums(rollout: SpmdRollout) -> dict[str, str] | str | None:
    """SGLang's own checksums; or why there are none."""
    try:
        return oracles.check_weights(rollout, "checksum")
    except RolloutError as error:
        return str(error).splitlines()[-1]


def _same_sums(number: int, before: dict[str, str] | str | None, now: dict[str, str] | str | None) -> list[Check]:
    if not isinstance(before, dict) or not isinstance(now, dict):
        return [Check(f"sync {number}, SGLang's checksums", False, now)] if isinstance(now, str) else []
    other = [name for name in before if before[name] != now.get(name)]
    found = f"{len(now)} equal" if not other else f"other: {_shown(other)}"
    return [Check(f"sync {number}, SGLang's checksums", bool(now) and not other, found)]


def _logprobs(options: argparse.Namespace, rollout: SpmdRollout, model: torch.nn.Module) -> list[Check]:
    far = difference(rollout, model, options.prompts, options.tokens)
    found = (
        f"mean difference {far.mean:.4f} (at most {options.threshold:g}), largest {far.largest:.4f}, {far.count} tokens"
    )
    return [Check("log-probabilities", far.mean <= options.threshold, found)]


def _compared(one: Digests, other: Digests, wrong: Callable[[str, str | None], bool]) -> list[str]:
    return [
        f"{name} of rank {rank}"
        for rank, (before, after) in enumerate(zip(one, other, strict=True))
        for name in before
        if wrong(before[name], after.get(name))
    ]


def _count(found: Digests) -> int:
    return sum(map(len, found))


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


@contextmanager
def _world() -> Iterator[None]:
    """The process group: torchrun's, or one of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with tempfile.TemporaryDirectory(prefix="verl-sync-prove-") as folder:
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
