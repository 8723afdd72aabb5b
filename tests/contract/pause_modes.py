# SPDX-License-Identifier: Apache-2.0
"""Checks requests in a real SGLang engine while our server's calls sync its weights: from verl and over HTTP."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from bare_engine.endpoint import PLAIN, BareEngine
from verl_sync_plugin.config.settings import SEPARATE_BACKEND
from verl_sync_plugin.errors import HalfWrittenError
from verl_sync_plugin.rollouts.sglang.request import FORGETTING_LOADER, dumps
from verl_sync_plugin.rollouts.sglang.server import SyncSGLangHttpServer

pytestmark = pytest.mark.slow

SLOW, STALL = "bare_engine.loaders.slow_down", "bare_engine.loaders.arm"
PROMPTS = [[(7 * i + 3 * place) % 90 + 5 for i in range(40)] for place in range(3)]
TOKENS = 120
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
            self.of = {1: first, 2: AutoModelForCausalLM.from_config(first.config, dtype=torch.bfloat16)}

    def packed(self, version: int) -> bytes:
        return dumps([(name, tensor.detach().clone()) for name, tensor in self.of[version].named_parameters()])

    def chosen_until(self, prompt: list[int], tokens: list[int]) -> int:
        """How many of the tokens version 1 chose, before the first that it did not."""
        logits = self.of[1](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        return next((at for at, token in enumerate(tokens) if not near(logits[at], token)), len(tokens))

    def chosen_by_second(self, prompt: list[int], tokens: list[int], since: int, cached: int) -> bool:
        """True if version 2 chose the tokens from ``since`` on, with ``cached`` tokens in version 1's KV cache."""
        whole = torch.tensor([prompt + tokens])
        past = self.of[1](whole[:, :cached], use_cache=True).past_key_values if cached else None
        logits = self.of[2](whole[:, cached:], past_key_values=past, use_cache=True).logits[0].float()
        at = len(prompt) - 1 - cached
        return all(near(logits[at + each], tokens[each]) for each in range(since, len(tokens)))


def near(logits: torch.Tensor, token: int) -> bool:
    return bool(logits.max() - logits[token] < NEAR * logits.std())


@pytest.fixture(scope="session")
def models(tiny_model: Callable[[str], str]) -> Models:
    return Models(tiny_model("qwen2"))


@pytest.fixture(scope="session")
def engine(models: Models) -> Iterator[BareEngine]:
    engine = BareEngine(models.path, 1, "auto", loaders=(FORGETTING_LOADER, SLOW, STALL))
    engine.call(engine.ask_loader(SLOW, ""))
    yield engine
    engine.shutdown()


def serving(engine: BareEngine, model: str, pause: str, separate: bool = True) -> Any:
    """Makes our server actor on the engine, before its first sync; its loads bring whole tensors."""
    from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
    from verl.workers.rollout.replica import RolloutMode

    backend, mode = (SEPARATE_BACKEND, RolloutMode.STANDALONE) if separate else ("naive", RolloutMode.HYBRID)
    sync, moves = {"pause": pause, "timeout_seconds": 20.0}, CheckpointEngineConfig(backend=backend)
    config = RolloutConfig(name="sglang", custom={"sync": sync}, checkpoint_engine=moves, max_model_len=256)
    server = SyncSGLangHttpServer(config, HFModelConfig(path=model), mode, [], 0, 0, 1, "", 0)
    server.loader = PLAIN[server.loader == FORGETTING_LOADER]
    server.tokenizer_manager = engine.tokenizer_manager
    server.guard_requests()
    return server


@asynccontextmanager
async def client_of(engine: BareEngine) -> Any:
    """SGLang's own HTTP endpoints, without the socket before them."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

    inside, app = engine.engine, http_server.app
    state = http_server._GlobalState(inside.tokenizer_manager, inside.template_manager, {})
    http_server.set_global_state(state)
    app.state.openai_serving_completion = OpenAIServingCompletion(inside.tokenizer_manager, inside.template_manager)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60) as client:
        yield client


Play = Callable[..., None]


@pytest.fixture
def play(engine: BareEngine, models: Models, monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """Runs a story in the engine's loop, on a server of a mode; loads name versions, a separate one has the first."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    packed = "verl_sync_plugin.rollouts.sglang.updates.pack_request"
    monkeypatch.setattr(packed, lambda request: models.packed(request[0]))

    def run(pause: str, story: Callable[[Run], Any], separate: bool = True) -> None:
        async def whole() -> None:
            async with client_of(engine) as client:
                run = Run(serving(engine, models.path, pause, separate), client)
                if separate:
                    asked = run.asking()
                    await run.waits(asked)
                    await run.server.abort_all_requests()
                    await run.sync(1)
                    await run.waits(asked)
                    await run.server.resume_generation()
                    check(models, await asked, 1)
                await story(run)

        engine.call(asyncio.wait_for(whole(), 120))

    yield run
    vars(engine.tokenizer_manager).pop("generate_request", None)  # the next server marks requests in its own way


def sampled(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


class Run:
    """Sends requests to one server, as verl and SGLang's HTTP endpoint do, and calls it around a sync as verl does."""

    def __init__(self, server: Any, client: httpx.AsyncClient) -> None:
        self.server, self.client, self.paced = server, client, 0
        self.version = ""  # of the last token of the request that sets the pace

    async def ask(self, prompt: list[int], tokens: int = TOKENS) -> Any:
        sampling = sampled(tokens)
        return await self.server.generate(prompt, sampling, f"{id(sampling)}-{prompt[1]}-{tokens}")

    async def in_flight(self) -> list[asyncio.Task[Any]]:
        """Requests that generate, and one more whose tokens are counted; all are under way when this returns."""
        asked = [asyncio.ensure_future(self.ask(prompt)) for prompt in PROMPTS]
        asked.append(asyncio.ensure_future(self.pace()))
        while self.paced < PRODUCED:
            assert not any(each.done() for each in asked), "nothing is in flight any more"
            await asyncio.sleep(0.001)
        return asked

    async def pace(self, tokens: int = TOKENS) -> None:
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(input_ids=[5, 6, 7], sampling_params=sampled(tokens), stream=True)
        async with aclosing(self.server.tokenizer_manager.generate_request(request, None)) as answers:
            async for answer in answers:
                meta = answer["meta_info"]
                self.paced, self.version = meta["completion_tokens"], meta["weight_version"]

    async def stand_still(self, asked: Sequence[asyncio.Task[Any]]) -> None:
        """Nothing is generated for a while."""
        await asyncio.sleep(0.1)  # what SGLang had generated before may still be on its way
        paced = self.paced
        await asyncio.sleep(PAUSED_SECONDS)
        assert self.paced == paced and not any(each.done() for each in asked)

    async def load(self, version: int) -> None:
        await self.server.load_weights((version,), str(version))

    async def sync(self, version: int) -> None:
        """Syncs a separate rollout whose driver has paused it."""
        await self.server.release_kv_cache()
        await self.load(version)
        await self.server.finish_sync([])
        await self.server.resume_kv_cache()

    async def wake(self, version: int) -> None:
        """Wakes the weights of a colocated rollout and loads new ones."""
        await self.server.resume_tags(["weights"])
        await self.load(version)

    async def sleep_and_wake(self, version: int) -> None:
        await self.server.sleep()
        await self.wake(version)
        await self.server.finish_sync(["kv_cache"])

    def asking(self, tokens: int = 20) -> asyncio.Task[httpx.Response]:
        """A request that comes past verl, over HTTP."""
        body = {"input_ids": PROMPTS[0], "sampling_params": sampled(tokens)}
        return asyncio.ensure_future(self.client.post("/generate", json=body))

    async def waits(self, *asked: asyncio.Task[httpx.Response]) -> None:
        await asyncio.sleep(0.5)  # an answer takes less
        assert not any(each.done() for each in asked)


def check_spanning(models: Models, prompt: list[int], output: Any, pause: str) -> None:
    """An answer that version 1 began and version 2 ended, with the KV cache that the mode promises."""
    tokens, fields = output.token_ids, output.extra_fields
    assert (len(tokens), output.stop_reason) == (TOKENS, "length"), "it came back early"
    assert (fields["min_global_steps"], fields["max_global_steps"], fields["global_steps"]) == (1, 2, 2)
    old = models.chosen_until(prompt, tokens)
    assert 0 < old < TOKENS, "either weights chose all of it"
    # The first that version 2 chose may by chance be version 1's choice too
    pure = any(models.chosen_by_second(prompt, tokens, since, 0) for since in (old, old - 1))
    kept = any(models.chosen_by_second(prompt, tokens, since, len(prompt) + since - 1) for since in (old, old - 1))
    assert (pure, kept) == ((True, False) if pause == "retract" else (False, True))


async def check_answers(run: Run, models: Models, pause: str, asked: list[asyncio.Task[Any]]) -> None:
    """Checks what became of the requests in flight, and that the engine goes on with new weights by itself."""
    *outputs, _ = await asyncio.gather(*asked)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        if pause == "abort":
            assert 0 < len(output.token_ids) < TOKENS and output.stop_reason == "abort"
            assert models.chosen_until(prompt, output.token_ids) == len(output.token_ids)
            assert "min_global_steps" not in output.extra_fields, "verl's client fills it in"
        else:
            check_spanning(models, prompt, output, pause)
    assert run.version == ("1" if pause == "abort" else "2")  # as over HTTP
    await check_new(models, pause, run.ask(PROMPTS[0], 20))


async def check_new(models: Models, pause: str, answer: Any) -> None:
    """An answer that was begun with version 2, without a prefix of old weights."""
    output = await answer
    fields = output.extra_fields
    assert fields["global_steps"] == 2 and len(output.token_ids) == 20
    assert pause == "abort" or fields["min_global_steps"] == fields["max_global_steps"] == 2
    assert models.chosen_by_second(PROMPTS[0], output.token_ids, 0, 0)


EVERY = pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])


@EVERY
def test_requests_go_on_with_new_weights_or_come_back_as_they_are(pause: str, play: Play, models: Models) -> None:
    """When a driver pauses the engine."""

    async def story(run: Run) -> None:
        asked, began = await run.in_flight(), time.perf_counter()
        await run.server.abort_all_requests()
        took = time.perf_counter() - began
        assert took < 0.9, f"{took:.2f} s: SGLang's own pause takes a second with a request in flight"
        inside = asked if pause != "abort" else []
        if not inside:
            await asyncio.gather(*asked)
        await run.stand_still(inside)
        new = asyncio.ensure_future(run.ask(PROMPTS[0], 20))
        await asyncio.sleep(0.05)
        await run.sync(2)
        await run.stand_still([*inside, new])
        await run.server.resume_generation()
        await check_answers(run, models, pause, asked)
        await check_new(models, pause, new)
        await run.pace()
        assert run.version == "2"

    play(pause, story)


@EVERY
def test_a_load_pauses_by_itself(pause: str, play: Play, engine: BareEngine, models: Models, tmp_path: Path) -> None:
    """Covers a group that stands, in which no driver pauses; nothing is generated after a load that failed, either."""

    async def story(run: Run) -> None:
        await engine.ask_loader(STALL, str(tmp_path))
        asked = await run.in_flight()
        loading = asyncio.ensure_future(run.load(2))
        while not (tmp_path / "stalled").exists():
            assert not loading.done(), "the load did not stand still"
            await asyncio.sleep(0.005)
        if pause == "abort":
            await asyncio.gather(*asked)  # all of them have come back
        inside = asked if pause != "abort" else []
        new, other = asyncio.ensure_future(run.ask(PROMPTS[0], 20)), Run(run.server, run.client)
        over_http = asyncio.ensure_future(other.pace(20))
        await run.stand_still([new, over_http, *inside])
        assert other.paced == 0 and not loading.done()
        (tmp_path / "go").touch()
        await loading
        await run.server.abandon_sync("injected: another rank failed")
        for refused in (new, over_http, run.ask(PROMPTS[0])):
            with pytest.raises(HalfWrittenError, match="injected: another rank failed"):
                await refused
        await run.stand_still(inside)
        await run.load(2)
        over_http = asyncio.ensure_future(other.pace(20))
        await run.stand_still([over_http, *inside])
        await run.server.finish_sync([])
        await over_http
        assert other.version == "2"
        await check_answers(run, models, pause, asked)

    play(pause, story)


def check(models: Models, answer: httpx.Response, version: int) -> None:
    assert answer.status_code == 200, answer.text
    tokens, meta = answer.json()["output_ids"], answer.json()["meta_info"]
    assert meta["weight_version"] == str(version) and len(tokens) == 20
    chosen = {1: models.chosen_until(PROMPTS[0], tokens) == 20, 2: models.chosen_by_second(PROMPTS[0], tokens, 0, 0)}
    assert chosen == {version: True, 3 - version: False}


def test_they_wait_while_the_engine_sleeps_and_are_refused_after_a_failure(play: Play, models: Models) -> None:
    """The weights that a colocated engine was launched with are made up, so they wait for the first sync, too."""

    async def story(run: Run) -> None:
        first = run.asking()
        await run.waits(first)
        await run.sleep_and_wake(1)
        check(models, await first, 1)
        await run.server.sleep()
        asked = [run.asking()]
        await run.waits(*asked)
        await run.server.resume_tags(["weights", "kv_cache"])
        await run.waits(*asked)  # the weights that were released are gone
        await run.wake(2)
        asked.append(run.asking())
        await run.waits(*asked)
        await run.server.abandon_sync("injected: another rank failed")
        body = {"model": "any", "prompt": PROMPTS[0], "max_tokens": 4}
        asked += [run.asking(), asyncio.ensure_future(run.client.post("/v1/completions", json=body))]
        for answer in await asyncio.gather(*asked):
            assert answer.status_code == 503 and "half written: injected: another rank failed" in answer.text
        await run.wake(2)
        await run.server.finish_sync(["kv_cache"])
        check(models, await run.asking(), 2)

    play("abort", story, separate=False)


@pytest.mark.parametrize("sleeps", [True, False], ids=["asleep", "awake"])
def test_those_in_flight_come_back_when_a_sync_begins(sleeps: bool, play: Play, models: Models) -> None:
    """SGLang would end itself if it were to release memory with a request inside, and load only when all have ended."""

    async def story(run: Run) -> None:
        await run.sleep_and_wake(1)
        asked = [*await run.in_flight(), run.asking(180)]
        await asyncio.sleep(0.05)
        if sleeps:
            await run.server.sleep()
        await run.wake(2)
        assert (await asked[-1]).json()["meta_info"]["finish_reason"]["type"] == "abort"
        await asyncio.gather(*asked)
        await run.server.finish_sync(["kv_cache"])
        check(models, await run.asking(), 2)

    play("abort", story, separate=False)
