# SPDX-License-Identifier: Apache-2.0
"""``verl-sync prove``: shows on the user's own model and machine that a sync brings the trainer's weights.

A real engine, a real trainer's model and the real phase: reset, sync, compare, as often as asked for; then
log-probabilities. The judges share no code with what moves the bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_sync_plugin.errors import RolloutError, SyncError
from verl_sync_plugin.log import some

if TYPE_CHECKING:
    from verl_sync_plugin.report import SyncReport

PROMPTS, PROMPT_TOKENS, TOKENS = 4, 12, 16  # of the log-probabilities; the last: of each response
LOADING_SECONDS = 600.0  # within which the ranks load the trainer's model, one earlier than another
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|MemoryError|out of memory", re.IGNORECASE)
_MORE_ROOM = (
    "Give the trainer's model more room: --trainer-dtype bfloat16 (half of float32), a lower --gpu-memory-utilization, "
    "a smaller model, or a device that nothing else uses."
)
Digests = list[dict[str, str]]


class Check(NamedTuple):
    """One line of the result."""

    check: str
    passed: bool
    found: str


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "prove",
        help="show on a model and this machine that a sync brings the trainer's weights into the engine",
        description="Starts SGLang with the checkpoint, has it fill its weights with random numbers, syncs them back "
        "from a trainer that holds the same checkpoint, and compares all parameters with SGLang's own load, and "
        "log-probabilities of fixed prompts with the trainer's. With --tp 2 under torchrun --nproc-per-node 2 -m "
        "verl_sync_plugin.cli. The exit code is 1 where anything differs, or could not be compared at all, else 0.",
    )
    parser.add_argument("model", help="folder of a HF checkpoint")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size of the engine; as many processes")
    parser.add_argument("--syncs", type=int, default=3, help="each after its own reset of the engine's weights")
    parser.add_argument("--dtype", default="bfloat16", help="of the engine")
    parser.add_argument("--trainer-dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4, help="of the engine")
    parser.add_argument("--threshold", type=float, default=0.03, help="on the mean difference of log-probabilities")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Runs the proof, and returns the exit code. Raises ValueError, with option, value and remedy."""
    model, tp = arguments.model, arguments.tp
    for option in ("tp", "syncs"):
        if getattr(arguments, option) < 1:
            raise ValueError(f"--{option} {getattr(arguments, option)}: use 1 or more")
    if not os.path.isfile(os.path.join(model, "config.json")):
        raise ValueError(f"{model}: no folder with a config.json; download the checkpoint and name its folder")
    if str(tp) != (world := os.environ.get("WORLD_SIZE", "1")):
        raise ValueError(
            f"--tp {tp} with WORLD_SIZE={world}: start one process per engine rank, with torchrun "
            f"--nproc-per-node {tp} -m verl_sync_plugin.cli prove {model} --tp {tp}"
        )
    if importlib.util.find_spec("torch") is None:
        raise ValueError("torch is not installed here: run it where verl and SGLang run")
    import torch
    import torch.distributed as dist

    from verl_sync_plugin.spmd import config_of

    config_of(model)  # looks whether it is whole
    checks: list[Check] = []
    reports: list[SyncReport] = []
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if cuda := torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", **alone)
    try:
        prove(arguments, checks, reports)
    except (RolloutError, SyncError, torch.OutOfMemoryError, MemoryError) as error:  # ends the checks, as the last
        text = " ".join(f"{error}".split()) or type(error).__name__
        checks.append(Check("the run", False, f"{text} {_MORE_ROOM}" if _OUT_OF_MEMORY.search(text) else text))
    finally:
        dist.destroy_process_group()
    if os.environ.get("RANK", "0") == "0":
        print(table(checks, reports))
    return int(not all(check.passed for check in checks))


def table(checks: Sequence[Check], reports: Sequence[SyncReport]) -> str:
    """The checks, one a line, and what they prove."""
    width, passed = max(len(check.check) for check in checks), all(check.passed for check in checks)
    lines = [f"{each.check:{width}}  {'ok' if each.passed else 'FAILED':6}  {each.found}" for each in checks]
    verdict = "proven" if passed else "NOT proven"
    # of the syncs' own proofs, the one that shows least
    if passed and (left := max((report.not_comparable for report in reports), default=0)):
        compared = min(report.verified_tensors for report in reports)
        verdict += " by the digests of all parameters; the syncs themselves compared "
        verdict += f"{compared} tensors in the engine, and could not compare {left}"
    return "\n".join([*lines, "", verdict])


def prove(options: argparse.Namespace, checks: list[Check], reports: list[SyncReport]) -> None:
    """Runs all checks, and appends them and the syncs' reports. Collective over the processes of torchrun."""
    import torch
    from transformers import AutoModelForCausalLM

    from verl_sync_plugin.spmd import SpmdRollout, errors
    from verl_sync_plugin.trainers.base import trainer_device
    from verl_sync_plugin.transport.agreement import Agreement

    def load() -> Any:
        dtype = getattr(torch, options.trainer_dtype)
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval().to(trainer_device())

    agreement = Agreement(LOADING_SECONDS)
    with errors("loading the trainer's model"):
        model = agreement.step("loading the trainer's model", load)
    with SpmdRollout(
        options.model,
        tensor_parallel_size=options.tp,
        dtype=options.dtype,
        gpu_memory_utilization=options.gpu_memory_utilization,
        random_weights=False,
        sync={"verify": "always"},
    ) as rollout:

        def digests() -> Digests:  # empty on the ranks that own no engine, which print nothing
            return rollout.digests() or []

        loaded = digests()
        total = sum(map(len, loaded))
        checks.append(Check("SGLang's own load", True, f"{total} parameters of {len(loaded)} ranks"))
        for number in range(1, options.syncs + 1):
            rollout.reset_weights()
            kept = _names(loaded, digests(), same=True)
            found = f"unchanged: {some(kept)}" if kept else f"random numbers in all {total} parameters"
            checks.append(Check(f"reset {number}", not kept, found))
            reports.append(report := rollout.sync_weights(model))
            way = "replayed" if report.replayed_tensors else "the engine's own load"
            way = "in place" if report.in_place else way
            other = _names(loaded, digests(), same=False)
            found = f"other: {some(other)}" if other else f"all {total} parameters as SGLang loads them itself"
            checks.append(Check(f"sync {number} ({way})", not other, f"{found}; {report.phase_seconds:.2f} s"))
            checks.append(_own_proof(number, report))
        with errors("comparing log-probabilities"):
            checks.append(agreement.step("comparing log-probabilities", lambda: _logprobs(options, rollout, model)))


def _own_proof(number: int, report: SyncReport) -> Check:
    """Judges what the sync itself compared in the engine. It proves nothing where nothing could be compared."""
    said = f"{report.verified_tensors} tensors compared in the engine, {report.not_comparable} not comparable"
    if not report.verified_tensors:
        said += ": this sync proves nothing itself"
    elif report.not_comparable:
        said += ": the log names these, and the digests alone judge them"
    return Check(f"sync {number}, its own proof", report.verified_tensors > 0, said)


def _logprobs(options: argparse.Namespace, rollout: Any, model: Any) -> Check:
    """Compares what the engine says of the tokens that it chose, after fixed random prompts, with the trainer."""
    import torch

    generator = torch.Generator().manual_seed(7)
    # Of the lower half: tokens that stand for images and the like are at its end
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    asked = torch.randint(max(1, vocabulary // 2), (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    answers = rollout.generate(asked, {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True})
    whole = torch.tensor([each.prompt_ids + each.response_ids for each in answers], device=rollout.device)
    with torch.no_grad():
        logits = model(input_ids=whole, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1].float()
        trained = torch.log_softmax(logits, -1).gather(-1, whole[:, PROMPT_TOKENS:, None])[..., 0]
    off = (trained - torch.tensor([each.log_probs for each in answers]).to(trained)).abs().double()
    mean, largest = float(off.mean()), float(off.max())  # NaN where either is
    found = f"mean difference {mean:.4f} (at most {options.threshold:g}), largest {largest:.4f}, {off.numel()} tokens"
    return Check("log-probabilities", mean <= options.threshold, found)


def _names(one: Digests, other: Digests, same: bool) -> list[str]:
    """The parameters of which both have the same digest, or not the same."""
    return [
        f"{name} of rank {rank}"
        for rank, (before, after) in enumerate(zip(one, other, strict=True))
        for name in before
        if (before[name] == after.get(name)) is same
    ]
