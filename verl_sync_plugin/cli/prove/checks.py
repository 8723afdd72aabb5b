# SPDX-License-Identifier: Apache-2.0
"""The proof itself: reset, sync, compare, as often as asked for; then log-probabilities."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from verl_sync_plugin.cli.prove.logprobs import differences
from verl_sync_plugin.errors import RolloutError, SyncError
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.rollouts import LOCAL, rollout_of
from verl_sync_plugin.spmd.engines import errors
from verl_sync_plugin.spmd.rollout import SpmdRollout
from verl_sync_plugin.transport.agreement import Agreement

NAMED = 3  # parameters in a line
LOADING_SECONDS = 600.0  # within which the ranks load the trainer's model, one earlier than another
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|MemoryError|out of memory", re.IGNORECASE)
_MORE_ROOM = (
    "Give the trainer's model more room: --trainer-dtype bfloat16 (half of float32), a lower --gpu-memory-utilization, "
    "a smaller model, or a device that nothing else uses."
)
Digests = list[dict[str, str]]


@dataclass(frozen=True)
class Check:
    """One line of the result.

    Attributes:
        check: what was looked at.
        passed: it is as it should be.
        found: what was found.
        skipped: it could not be looked at here.
        compared: of a sync's own proof, how many tensors it compared in the engine.
        not_comparable: and how many it could not, which it says nothing of.
    """

    check: str
    passed: bool
    found: str
    skipped: bool = False
    compared: int | None = None
    not_comparable: int | None = None

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
        except (RolloutError, SyncError, torch.OutOfMemoryError, MemoryError) as error:
            checks.append(_failed(error))
    return checks


def _failed(error: BaseException) -> Check:
    """What ended the run, in one line, with a remedy where memory did."""
    text = " ".join(f"{error}".split()) or type(error).__name__
    memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or _OUT_OF_MEMORY.search(text)
    return Check("the run", False, f"{text} {_MORE_ROOM}" if memory else text)


def _model(options: argparse.Namespace, agreement: Agreement) -> torch.nn.Module:
    """The trainer's model. Collective.

    Raises:
        RolloutError: a rank could not load it; the same text on every rank.
    """
    from transformers import AutoModelForCausalLM

    def load() -> torch.nn.Module:
        dtype = getattr(torch, options.trainer_dtype)
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
        return model.to(torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu")

    with errors("loading the trainer's model"):
        return agreement.step("loading the trainer's model", load)


def _prove(options: argparse.Namespace, checks: list[Check]) -> None:
    agreement = Agreement(LOADING_SECONDS)
    model = _model(options, agreement)
    with SpmdRollout(
        options.model,
        tensor_parallel_size=options.tp,
        dtype=options.dtype,
        gpu_memory_utilization=options.gpu_memory_utilization,
        random_weights=False,
        sync={"verify": "always"},
        engine={"custom_weight_loader": [rollout_of(LOCAL).DIGEST_LOADER]},
    ) as rollout:
        loaded = rollout.digests()
        sums = _checksums(rollout)
        if loaded is not None:
            checks.append(Check("SGLang's own load", True, f"{_count(loaded)} parameters of {len(loaded)} ranks"))
        if isinstance(sums, str):
            checks.append(Check("SGLang's checksums", True, f"digests of all parameters stand for them: {sums}", True))
        for number in range(1, options.syncs + 1):
            rollout.check_weights("reset_tensors")
            checks += _reset(number, loaded, rollout.digests())
            report = rollout.sync_weights(model)
            checks += _synced(number, loaded, rollout.digests(), report)
            if not isinstance(sums, str):
                checks += _same_sums(number, sums, _checksums(rollout))
        with errors("comparing log-probabilities"):
            checks += agreement.step("comparing log-probabilities", lambda: _logprobs(options, rollout, model))


def _reset(number: int, loaded: Digests | None, now: Digests | None) -> list[Check]:
    """Nothing is left of what the engine held."""
    if loaded is None or now is None:
        return []
    kept = _compared(loaded, now, lambda before, after: before == after)
    found = f"random numbers in all {_count(now)} parameters" if not kept else f"unchanged: {_shown(kept)}"
    return [Check(f"reset {number}", not kept, found)]


def _synced(number: int, loaded: Digests | None, now: Digests | None, report: SyncReport) -> list[Check]:
    """Every parameter is again what SGLang's own load of the checkpoint makes of it, and the sync's own proof holds."""
    own = _own_proof(number, report)
    way = "in place" if report.direct_bytes else ("replayed" if report.replayed_tensors else "the engine's own load")
    if loaded is None or now is None:
        return [own]
    other = _compared(loaded, now, lambda before, after: before != after)
    found = f"all {_count(now)} parameters as SGLang loads them itself" if not other else f"other: {_shown(other)}"
    return [Check(f"sync {number} ({way})", not other, f"{found}; {report.phase_seconds:.2f} s"), own]


def _own_proof(number: int, report: SyncReport) -> Check:
    """What the sync itself compared in the engine: nothing is proven where nothing could be compared, nor where an
    engine rank had no memory to find out what it holds; and of what is not comparable it says nothing."""
    compared, left_out = report.verified_tensors, report.not_comparable
    said = f"{compared} tensors compared in the engine, {left_out} not comparable"
    if report.no_room:
        said += f", for want of memory ({report.no_room}). A lower --gpu-memory-utilization leaves room."
    elif not compared:
        said += ": this sync proves nothing itself"
    elif left_out:
        said += ": the log names these, and the digests alone judge them"
    passed = compared > 0 and not report.no_room
    return Check(f"sync {number}, its own proof", passed, said, compared=compared, not_comparable=left_out)


def _checksums(rollout: SpmdRollout) -> dict[str, str] | str | None:
    """SGLang's own checksums; or why there are none."""
    try:
        return rollout.check_weights("checksum")
    except RolloutError as error:
        return str(error).splitlines()[-1]


def _same_sums(number: int, before: dict[str, str] | str | None, now: dict[str, str] | str | None) -> list[Check]:
    if not isinstance(before, dict) or not isinstance(now, dict):
        return [Check(f"sync {number}, SGLang's checksums", False, now)] if isinstance(now, str) else []
    other = [name for name in before if before[name] != now.get(name)]
    found = f"{len(now)} equal" if not other else f"other: {_shown(other)}"
    return [Check(f"sync {number}, SGLang's checksums", bool(now) and not other, found)]


def _logprobs(options: argparse.Namespace, rollout: SpmdRollout, model: torch.nn.Module) -> list[Check]:
    far = differences(rollout, model, options.prompts, options.tokens)
    found = (
        f"mean difference {far.mean():.4f} (at most {options.threshold:g}), largest {far.max():.4f}, {len(far)} tokens"
    )
    return [Check("log-probabilities", bool(far.mean() <= options.threshold), found)]


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
