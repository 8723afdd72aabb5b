# SPDX-License-Identifier: Apache-2.0
"""What becomes of requests in flight in a real SGLang engine while our server actor's calls sync its weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest
import torch

from bare_engine.endpoint import PLAIN, BareEngine
from verl_sync_plugin.config.settings import SEPARATE_BACKEND
from verl_sync_plugin.rollouts.sglang import server as server_module
from verl_sync_plugin.rollouts.sglang import updates
from verl_sync_plugin.rollouts.sglang.pickling import dumps

pytestmark = pytest.mark.slow

PROMPTS = [[(7 * i + 3 * place) % 90 + 5 for i in range(40)] for place in range(3)]
TOKENS = 200
PRODUCED = 12  # tokens of the request that sets the pace, when generation is paused
PAUSED_SECONDS = 0.3
# How far below the largest logit a token may be that an engine in bfloat16 took for it
NEAR = 0.08


class Models:
    """The model with its weights as in the checkpoint (version 1), and with others of another seed (version 2)."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        self.path = path
        first = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        with torch.random.fork_rng():
            torch.manual_seed(11)
            second = AutoModelForCausalLM.from_config(first.config, dtype=torch.bfloat16)
        self.of = {1: first, 2: second}

    def packed(self, version: int) -> bytes:
        return dumps([(name, tensor.detach().clone()) for name, tensor in self.of[version].named_parameters()])

    def chosen_until(self, prompt: list[int], tokens: list[int]) -> int:
        """How many of the tokens version 1 chose, before the first that it did not."""
        logits = self.of[1](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        return next((at for at, token in enumerate(tokens) if not near(logits[at], token)), len(tokens))

    def chosen_by_second(self, prompt: list[int], tokens: list[int], since: int, cached: int) -> bool:
        """Whether version 2 chose the tokens from ``since`` on, with so much of the KV cache computed by version 1."""
        whole = torch.tensor([prompt + tokens])
        past = self.of[1](whole[:, :cached], use_cache=True).past_key_values if cached else None
        logits = self.of[2](whole[:, cached:], past_key_values=past, use_cache=True).logits[0].float()
        at = len(prompt) - 1 - cached
        return all(near(logits[at + each], tokens[each]) for each in range(since, len(tokens)))


def near(logits: torch.Tensor, token: int) -> bool:
    return bool(logits.max() - logits[token] < NEAR * logits.std())


@pytest.fixture(scope="module")
def models(tiny_model: Callable[[str], str]) -> Models:
    return Models(tiny_model("qwen2"))


@pytest.fixture(scope="module")
def engine(models: Models) -> Iterator[BareEngine]:
    engine = BareEngine(models.path, 1, "auto")
    yield engine
    engine.shutdown()


Play = Callable[[str, Callable[["Run"], Any]], None]


class Run:
    """Our server actor on the engine, and the calls that verl makes of it."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.paced = 0
        self.told: tuple[list[str] | None, str] | None = None  # of the request that sets the pace: its versions

    async def load(self, version: int) -> None:
        await self.server.release_kv_cache()
        await self.server.load_weights((version,), str(version))

    async def sync(self, version: int) -> None:
        await self.load(version)
        await self.server.finish_sync([])
        await self.server.resume_kv_cache()

    async def ask(self, prompt: list[int], tokens: int = TOKENS) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return await self.server.generate(prompt, sampling, f"{id(sampling)}-{prompt[1]}-{tokens}")

    async def in_flight(self) -> list[asyncio.Task[Any]]:
        """Requests that generate, and one more whose tokens are counted; all are under way when this returns."""
        asked = [asyncio.ensure_future(self.ask(prompt)) for prompt in PROMPTS]
        asked.append(asyncio.ensure_future(self._pace()))
        while self.paced < PRODUCED:
            assert not any(each.done() for each in asked), "nothing is in flight any more"
            await asyncio.sleep(0.001)
        return asked

    async def _pace(self) -> None:
        from sglang.srt.managers.io_struct import GenerateReqInput

        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        request = GenerateReqInput(input_ids=[5, 6, 7], sampling_params=sampling, stream=True)
        async with aclosing(self.server.tokenizer_manager.generate_request(request, None)) as answers:
            async for answer in answers:
                self.paced = answer["meta_info"]["completion_tokens"]
                self.told = answer["meta_info"].get("weight_versions"), answer["meta_info"]["weight_version"]


@pytest.fixture
def play(engine: BareEngine, models: Models, monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """Runs a story in the engine's loop, on a server of the given mode, from version 1 on."""
    from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
    from verl.workers.rollout.replica import RolloutMode

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(updates, "pack_request", lambda request: models.packed(request[0]))

    class Server(server_module.SyncSGLangHttpServer):
        loader = property(lambda self: PLAIN[self.pause == "retract"])  # type: ignore[assignment]

    def run(pause: str, story: Callable[[Run], Any]) -> None:
        separate = CheckpointEngineConfig(backend=SEPARATE_BACKEND)
        config = RolloutConfig(
            name="sglang", custom={"sync": {"pause": pause}}, checkpoint_engine=separate, max_model_len=256
        )
        server = Server(config, HFModelConfig(path=models.path), RolloutMode.STANDALONE, [], 0, 0, 1, "", 0)
        server.tokenizer_manager = engine.engine.tokenizer_manager
        server.mark_requests()

        async def whole() -> None:
            run = Run(server)
            await run.server.abort_all_requests()
            await run.sync(1)
            await run.server.resume_generation()
            await story(run)

        engine.call(asyncio.wait_for(whole(), 120))

    yield run
    vars(engine.engine.tokenizer_manager).pop("generate_request", None)


async def stands_still(run: Run, asked: list[asyncio.Task[Any]]) -> None:
    """Nothing is generated for a while."""
    await asyncio.sleep(0.1)  # what SGLang had generated before may still be on its way
    paced = run.paced
    await asyncio.sleep(PAUSED_SECONDS)
    assert run.paced == paced and not any(each.done() for each in asked)


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_requests_stay_in_the_engine_and_go_on_with_new_weights(pause: str, play: Play, models: Models) -> None:
    async def story(run: Run) -> None:
        server, asked = run.server, await run.in_flight()
        await server.abort_all_requests()
        await stands_still(run, asked)
        new = asyncio.ensure_future(run.ask(PROMPTS[0], 20))
        await asyncio.sleep(0.05)
        await run.sync(2)
        await stands_still(run, [*asked, new])
        await server.resume_generation()
        outputs = await asyncio.gather(*asked[:-1])
        await asked[-1]
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            check_spanning(models, prompt, output, pause)
        for output in (await new, await run.ask(PROMPTS[1], 20)):
            assert output.extra_fields["min_global_steps"] == output.extra_fields["max_global_steps"] == 2
        assert run.told == (["1", "2"], "2"), "as over HTTP: a response that spans a sync says so"
        await run._pace()
        assert run.told == (["2"], "2")
        assert models.chosen_by_second(PROMPTS[0], (await new).token_ids, 0, 0), "a prefix of old weights was used"

    play(pause, story)


def check_spanning(models: Models, prompt: list[int], output: Any, pause: str) -> None:
    tokens, fields = output.token_ids, output.extra_fields
    assert (len(tokens), output.stop_reason) == (TOKENS, "length"), "it came back early"
    assert (fields["min_global_steps"], fields["max_global_steps"], fields["global_steps"]) == (1, 2, 2)
    old = models.chosen_until(prompt, tokens)
    assert 0 < old < TOKENS, "either weights chose all of it"
    # The first that version 2 chose may by chance be version 1's choice too
    pure = any(models.chosen_by_second(prompt, tokens, since, 0) for since in (old, old - 1))
    kept = any(models.chosen_by_second(prompt, tokens, since, len(prompt) + since - 1) for since in (old, old - 1))
    assert (pure, kept) == ((True, False) if pause == "retract" else (False, True))


def test_aborted_requests_come_back_with_what_they_have(play: Play, models: Models) -> None:
    async def story(run: Run) -> None:
        asked, began = await run.in_flight(), time.perf_counter()
        await run.server.abort_all_requests()
        took = time.perf_counter() - began
        assert took < 0.9, f"{took:.2f} s: SGLang's own pause takes a second with a request in flight"
        print(f"paused after {took:.3f} s")
        for prompt, output in zip(PROMPTS, await asyncio.gather(*asked[:-1]), strict=True):
            assert 0 < len(output.token_ids) < TOKENS and output.stop_reason == "abort"
            assert models.chosen_until(prompt, output.token_ids) == len(output.token_ids)
            assert "min_global_steps" not in output.extra_fields, "verl's client fills it in"
        await run.sync(2)
        await run.server.resume_generation()
        output = await run.ask(PROMPTS[0], 20)
        assert models.chosen_by_second(PROMPTS[0], output.token_ids, 0, 0)

    play("abort", story)


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_requests_wait_until_a_sync_succeeds(pause: str, play: Play) -> None:
    async def story(run: Run) -> None:
        asked = await run.in_flight()
        await run.server.abort_all_requests()
        await run.load(2)
        await run.server.abandon_sync("another rank failed")
        with pytest.raises(RuntimeError, match="half written: another rank failed"):
            await run.server.resume_generation()
        with pytest.raises(RuntimeError, match="half written: another rank failed"):
            await run.ask(PROMPTS[0])
        await stands_still(run, asked)
        await run.server.abort_all_requests()  # verl begins the next sync as it began this one
        await run.sync(2)
        await run.server.resume_generation()
        outputs = await asyncio.gather(*asked[:-1])
        assert [len(output.token_ids) for output in outputs] == [TOKENS] * len(PROMPTS)
        await asked[-1]

    play(pause, story)
