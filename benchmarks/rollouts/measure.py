# SPDX-License-Identifier: Apache-2.0
"""Times rollouts of SGLang alone: an adapter merged into the weights against one that SGLang serves.

``python -m benchmarks.rollouts --case rollouts-lora-1p8b-1gpu --model dense-1p8b --out FILE``

A merged model is a model without an adapter, and weights of other values take no other time, so both servers make up
their weights; the served adapter has random factors of the rank and modules given. Every rollout asks the same prompts
for the same number of tokens, greedily and whatever is generated. ``stock`` is a server without the plugin's part.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import gauges, machine, schema
from benchmarks.command import command_line
from benchmarks.soak.trainers import TARGETS
from benchmarks.transfer import models, rig

HARNESS = "rollouts"
WAYS = ("merged", "served")
FLUSH_SECONDS = 10.0


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollouts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", required=True)
    parser.add_argument("--model", choices=sorted(models.CONFIGS), required=True)
    parser.add_argument("--variants", default="stock,plugin")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=64, help="answered at the same time")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024, help="of every answer")
    parser.add_argument("--repeat", type=int, default=6, help="measured rollouts, behind one that warms up")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", type=Path, help="folder for config and log; default: temporary")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    args.variants = args.variants.split(",")
    if unknown := set(args.variants) - set(schema.VARIANTS):
        parser.error(f"unknown variants {sorted(unknown)}; choose from {', '.join(schema.VARIANTS)}")
    if args.repeat < 2:
        parser.error("--repeat: at least 2, for a spread")
    return args


def server_options(args: argparse.Namespace, way: str) -> list[str]:
    """What SGLang's command line needs beyond what every server here has; the default backend, as with verl."""
    options = ["--cuda-graph-bs", "1", "16", str(args.prompts)] if args.device == "cuda" else []
    if way == "merged":
        return options
    backend = ["--lora-backend", "torch_native"] if args.device == "cpu" else []
    options += ["--enable-lora", *backend, "--max-lora-rank", str(args.rank), "--lora-target-modules", *TARGETS]
    return options


def factors(kind: str, rank: int) -> dict[str, Any]:
    """Random LoRA factors in bf16 for all linear layers of a model, on the host, by PEFT's names."""
    import torch

    generator = torch.Generator().manual_seed(1)
    made = {}
    for name, shape in models.shapes(kind):
        module = name.removesuffix(".weight")
        if module != name and module.rpartition(".")[2] in TARGETS:
            sides = {"lora_A": (rank, shape[1]), "lora_B": (shape[0], rank)}
            for side, size in sides.items():
                # large, for SGLang's made-up weights are near zero, norms included, and the adapter has to show
                tensor = torch.randn(size, generator=generator).to(torch.bfloat16)
                made[f"base_model.model.{module}.{side}.weight"] = tensor
    return made


def _generate(args: argparse.Namespace, server: Any) -> int:
    """One rollout; returns how many tokens were generated."""
    prompts = [[100 + (row + place) % 150 for place in range(args.prompt_tokens)] for row in range(args.prompts)]
    sampling = {"temperature": 0, "max_new_tokens": args.tokens, "ignore_eos": True}
    adapter = {"lora_path": server.adapter} if server.adapter else {}
    answers = server.ask("POST", "/generate", {"input_ids": prompts, "sampling_params": sampling, **adapter})
    return sum(len(answer["output_ids"]) for answer in answers)


def _flush(server: Any) -> None:
    """Empties the prefix cache. SGLang refuses while it still clears up behind the last answer, so this asks again.

    Raises:
        RuntimeError: it refuses for longer.
    """
    end = time.monotonic() + FLUSH_SECONDS
    while True:
        try:
            server.ask("GET", "/flush_cache")
            return
        except RuntimeError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def rollouts(args: argparse.Namespace, way: str, server: Any) -> list[dict[str, Any]]:
    """Seconds and tokens of every measured rollout.

    Raises:
        RuntimeError: an answer was shorter than asked for, or the adapter changes nothing.
    """
    from benchmarks.transfer.endpoint import ServerEndpoint

    if way == "served":
        bare = server.tokens()
        settings = {"peft_type": "LORA", "r": args.rank, "lora_alpha": args.rank * 8, "target_modules": TARGETS}
        asyncio.run(ServerEndpoint(server).load_adapter(settings, factors(args.model, args.rank), None))
        if server.tokens() == bare:
            raise RuntimeError("the server generates the same with the adapter as without: it is not used")
    samples = []
    for _ in range(args.repeat + 1):
        _flush(server)  # or the prompts of the one before would not be computed again
        started = time.perf_counter()
        tokens = _generate(args, server)
        samples.append({"seconds": round(time.perf_counter() - started, 6), "tokens": tokens})
        print(json.dumps({"way": way, **samples[-1]}), flush=True)
        if tokens != args.prompts * args.tokens:
            raise RuntimeError(f"{tokens} tokens instead of {args.prompts} times {args.tokens}")
    return samples[1:]


def _run(args: argparse.Namespace, variant: str, way: str, work: Path) -> dict[str, Any]:
    """One entry of ``runs``, of a server of its own."""
    from benchmarks.transfer.server import Server

    if variant == "stock":
        os.environ["SGLANG_PLUGINS"] = "none"
    else:
        os.environ.pop("SGLANG_PLUGINS", None)
    folder = models.write_config(args.model, work / args.model)
    server = Server(folder, args.device, work / f"{args.case}-{variant}-{way}-server.log", server_options(args, way))
    try:
        samples = rollouts(args, way, server)
    finally:
        server.stop()
    seconds = statistics.median(sample["seconds"] for sample in samples)
    settings = {"harness": HARNESS, "way": way, "model": args.model, "rank": args.rank, "device": args.device}
    return {
        "variant": variant,
        "settings": {**settings, "prompts": args.prompts, "tokens": args.tokens},
        "stages": {**dict.fromkeys(schema.STAGES, 0.0), "phase": seconds},
        "samples": {"syncs": samples},
        "bytes": None,
        "peak_device_bytes": None,
        "peak_host_bytes": gauges.rss_peak_bytes(),
    }


def main(argv: list[str] | None = None) -> int:
    """Measures one case and writes the result after each server; raises when a server fails."""
    args = arguments(argv)
    work = (args.work or Path(tempfile.mkdtemp(prefix="sync-rollouts-"))).resolve()
    runs: list[dict[str, Any]] = []
    with rig.one_rank(work):
        for variant, way in itertools.product(args.variants, WAYS):
            if args.device == "cuda":
                machine.wait_until_idle()
            runs.append(_run(args, variant, way, work))
            result = machine.result(args.case, command_line("rollouts", args), runs)
            assert not schema.problems(result), schema.problems(result)
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0
