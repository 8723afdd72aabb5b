# SPDX-License-Identifier: Apache-2.0
"""Times how long an SGLang engine with requests in flight is paused for a sync, beyond the load of the weights.

``python -m benchmarks.pauses --case pauses-dense-7b-1gpu --model 7b --out FILE``

One engine with random weights serves verl's server (``stock``) and ours in each mode of
``custom.sync.pause``. They get the calls of a sync of a separate rollout while ``--requests`` requests are answered.
The load is of one norm alone: everything else is timed. ``gap`` is the longest time between two tokens of one request
more.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import common, gauges, models, transfer
from benchmarks.common import command_line
from benchmarks.pauses_loader import FORGETTING_LOADER, LOADER

STOCK = "stock"
WAYS = (STOCK, "abort", "retract", "in_place")
NORM = "model.norm.weight"
_CUDA: dict[str, Any] = {
    "attention_backend": "triton", "mem_fraction_static": 0.6, "disable_piecewise_cuda_graph": True,
    "enable_memory_saver": True,
}  # fmt: skip
_CPU: dict[str, Any] = {
    "device": "cpu", "attention_backend": "torch_native", "mem_fraction_static": 0.1, "disable_cuda_graph": True,
    "disable_overlap_schedule": True, "max_total_tokens": 4096,
}  # fmt: skip


@contextmanager
def paused_engine(args: argparse.Namespace, folder: Path) -> Iterator[Any]:
    """SGLang in this process, with its scheduler in one of its own."""
    import sglang

    folder.mkdir(parents=True, exist_ok=True)
    models.write_tokenizer(folder)
    models.config_of(args.model).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["Qwen3MoeForCausalLM" if "num_experts" in config else "Qwen2ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    graphs = {"cuda_graph_bs": [1, 16, args.requests + 1], **_CUDA}
    made = sglang.Engine(
        model_path=str(folder), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True,
        sampling_backend="pytorch", grammar_backend="none", log_level="warning", context_length=2048,
        max_running_requests=args.requests + 1, custom_weight_loader=[LOADER, FORGETTING_LOADER],
        **(graphs if args.device == "cuda" else _CPU),
    )  # fmt: skip
    # verl's server says so of itself, which has no GPU of its own
    with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
        try:
            yield made
        finally:
            made.shutdown()


class Delivery:
    """A server of verl's or ours on the engine.

    Args:
        name: of ``WAYS``.
        engine: of SGLang.
        folder: of its model.
        args: the command line.
    """

    def __init__(self, name: str, paused_engine: Any, folder: Path, args: argparse.Namespace) -> None:
        from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
        from verl.workers.rollout.replica import RolloutMode
        from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

        from verl_sync_plugin.config.settings import SEPARATE_BACKEND
        from verl_sync_plugin.rollouts.sglang.server import SyncSGLangHttpServer

        stock = name == STOCK
        custom = {} if stock else {"sync": {"pause": name}}
        backend = CheckpointEngineConfig(backend="nccl" if stock else SEPARATE_BACKEND)
        config = RolloutConfig(name="sglang", custom=custom, checkpoint_engine=backend, max_model_len=2048)
        made = (SGLangHttpServer if stock else SyncSGLangHttpServer)(
            config, HFModelConfig(path=str(folder)), RolloutMode.STANDALONE, [], 0, 0, 1, "", 0
        )
        made.tokenizer_manager = paused_engine.tokenizer_manager
        self.name, self._server, self._manager, self._args = name, made, paused_engine.tokenizer_manager, args
        self._width = json.loads((folder / "config.json").read_text(encoding="utf-8"))["hidden_size"]
        self._version = 0
        if not stock:
            made.loader = FORGETTING_LOADER if name == "retract" else LOADER
            made.guard_requests()
            made._gate.succeed(made._gate.begin())  # as after its first sync

    def close(self) -> None:
        """Takes back what a server adds to SGLang's tokenizer manager."""
        vars(self._manager).pop("generate_request", None)

    def _norm(self) -> bytes:
        import torch

        from verl_sync_plugin.rollouts.sglang.request import dumps

        return dumps([(NORM, torch.ones(self._width, dtype=torch.bfloat16))])

    async def _load(self) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput([self._norm()], load_format=LOADER, flush_cache=False)
        success, message = await self._manager.update_weights_from_tensor(request, None)
        assert success, message

    async def sync(self) -> None:
        """The calls that a server gets in a sync of a group that stands."""
        server = self._server
        self._version += 1
        if self.name != STOCK:
            await server.load_weights((), str(self._version))
            await server.finish_sync([])
            return
        await server.abort_all_requests()
        await server.release_kv_cache()
        await self._load()
        await self._manager.flush_cache()
        await server.resume_kv_cache()
        await server.resume_generation()

    async def _ask(self, number: int) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": self._args.tokens, "ignore_eos": True}
        prompt = [(7 * number + 3 * place) % 90 + 5 for place in range(64)]
        return await self._server.generate(prompt, sampling, f"{self.name}-{self._version}-{number}")

    async def _tokens(self, arrived: list[float]) -> None:
        """A further request, of which every token is noted."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        sampling = {"temperature": 0, "max_new_tokens": self._args.tokens, "ignore_eos": True}
        request = GenerateReqInput(input_ids=[5, 6, 7], sampling_params=sampling, stream=True)
        async with aclosing(self._manager.generate_request(request, None)) as answers:
            async for _ in answers:
                arrived.append(time.perf_counter())

    async def sample(self) -> dict[str, Any]:
        """One sync with requests in flight.

        Raises:
            RuntimeError: a request had ended before the sync, or did not come back as its mode promises.
        """
        arrived: list[float] = []
        asked = [asyncio.ensure_future(self._ask(number)) for number in range(self._args.requests)]
        further = asyncio.ensure_future(self._tokens(arrived))
        while len(arrived) < self._args.ahead and not further.done():
            await asyncio.sleep(0.001)
        if any(each.done() for each in (*asked, further)):
            raise RuntimeError(f"{self.name}: a request had ended before the sync: raise --tokens")
        started = time.perf_counter()
        await self.sync()
        paused = time.perf_counter() - started
        answers = await asyncio.gather(*asked)
        await further
        whole = sum(len(answer.token_ids) == self._args.tokens for answer in answers)
        if whole != (0 if self.name in (STOCK, "abort") else self._args.requests):
            raise RuntimeError(f"{self.name}: {whole} of {self._args.requests} answers are whole")
        gap = max(later - earlier for earlier, later in itertools.pairwise(arrived))
        return {"seconds": round(paused, 6), "gap": round(gap, 6) if whole else None}

    async def samples(self) -> list[dict[str, Any]]:
        """All measured syncs, after one that warms up."""
        from verl_sync_plugin.rollouts.sglang import updates

        found = []
        with patch.object(updates, "pack_request", lambda request: self._norm()):
            for _ in range(self._args.repeat + 1):
                found.append(await self.sample())
                print(json.dumps({"way": self.name, **found[-1]}), flush=True)
        return found[1:]


HARNESS = "pauses"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = common.parser_of(HARNESS, __doc__)
    parser.add_argument("--model", choices=sorted(models.SHAPES), required=True)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--requests", type=int, default=64, help="in flight at every sync")
    parser.add_argument("--tokens", type=int, default=256, help="of every answer")
    parser.add_argument("--ahead", type=int, default=64, help="tokens of the one that is watched, before the sync")
    parser.add_argument("--repeat", type=int, default=5, help="measured syncs per way, after one that warms up")
    args = parser.parse_args(argv)
    args.ways = args.ways.split(",")
    if unknown := set(args.ways) - set(WAYS):
        parser.error(f"unknown ways {sorted(unknown)}; choose from {', '.join(WAYS)}")
    return args


def run_of(args: argparse.Namespace, way: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """One entry of ``runs``."""
    seconds = statistics.median(sample["seconds"] for sample in samples)
    settings = {"harness": HARNESS, "way": way, "model": args.model, "device": args.device}
    return {
        "variant": STOCK if way == STOCK else "plugin",
        "settings": {**settings, "requests": args.requests, "tokens": args.tokens},
        "stages": {**dict.fromkeys(common.STAGES, 0.0), "phase": seconds},
        "samples": {"syncs": samples},
        "bytes": None,
        "peak_device_bytes": None,
        "peak_host_bytes": gauges.rss_peak_bytes(),
    }


def main(argv: list[str] | None = None) -> int:
    """Measures one case and writes the result after each way; raises when one fails."""
    args = arguments(argv)
    work = common.work_of(args)
    runs: list[dict[str, Any]] = []
    folder = work / f"{args.model}-dummy"
    with transfer.one_rank(work), paused_engine(args, folder) as made:
        asyncio.set_event_loop(made.loop)
        for name in args.ways:
            way = Delivery(name, made, folder, args)
            runs.append(run_of(args, name, made.loop.run_until_complete(way.samples())))
            way.close()
            common.write_result(args.out, common.result_of(args.case, command_line("pauses", args), runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
