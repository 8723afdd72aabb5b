# SPDX-License-Identifier: Apache-2.0
"""The engine of a script, in a process of its own: ``python -m verl_sync_plugin.rollouts.sglang.local_server FD``.

SGLang changes the process that it lives in (signals, start method, event loop, environment) and ends it when a
scheduler dies, so it does not live in the script's. ``local.py`` starts this module and speaks to it through the socket
``FD``: first come the arguments, then calls of ``LocalServer``'s methods. When the script ends, however it does, the
socket closes, and so does the engine.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from verl_sync_plugin.rollouts.sglang.arguments import AT_LAUNCH, refuse_arguments, resolved
from verl_sync_plugin.rollouts.sglang.awake import KV_CACHE, WEIGHTS
from verl_sync_plugin.rollouts.sglang.gate import WeightsGate
from verl_sync_plugin.rollouts.sglang.oracles import Oracles
from verl_sync_plugin.rollouts.sglang.request import LOADER, hand_down, new_token
from verl_sync_plugin.rollouts.sglang.updates import WeightUpdates

RELEASED = "the engine's weights were released, and SGLang keeps no copy of them: call sync_weights first"

Answered = tuple[list[int], list[float], str]  # tokens, their log-probabilities, why the response ended


class LocalServer(WeightUpdates, Oracles):
    """SGLang and the calls that a script may make of it. All methods run in SGLang's event loop.

    Args:
        arguments: SGLang's.
        timeout_seconds: bound on its sleep and wake.
        unready: why nothing may be generated before the first sync; empty when it may.
        keeps_copy: weights that were released come back as they were.
    """

    loader = LOADER
    keeps_requests = False

    def __init__(self, arguments: dict[str, Any], timeout_seconds: float, unready: str, keeps_copy: bool) -> None:
        import sglang

        hand_down(new_token())
        self.engine = sglang.Engine(**arguments)
        self.tokenizer_manager = self.engine.tokenizer_manager
        refuse_arguments(resolved(self.tokenizer_manager), "engine", "use another model", AT_LAUNCH)
        self.global_steps = None
        self._gate = WeightsGate()
        self._unready, self._keeps_copy = unready, keeps_copy
        self.expect_updates(timeout_seconds)

    async def begin_load(self) -> None:
        """A load starts: the gate closes."""
        self._gate.begin()

    async def finish_sync(self, tags: list[str]) -> None:
        """See ``WeightUpdates``; from here on the engine has the trainer's weights."""
        await super().finish_sync(tags)
        self._unready = ""

    async def release(self, tags: list[str]) -> None:
        """Releases what is still resident of ``tags``."""
        if WEIGHTS in tags and not self._keeps_copy:
            self._unready = self._unready or RELEASED
        await self.release_tags(tags)

    async def resume(self, tags: list[str]) -> None:
        """Resumes what is released of ``tags``; once all is there, what was cached before is forgotten."""
        await self.resume_tags(tags)
        await self._flush()

    async def generate(self, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> list[Answered]:
        """One response to each prompt.

        Raises:
            RuntimeError: the engine has no weights to generate from, or its memory is released.
            ValueError: SGLang refuses a prompt or a sampling parameter.
        """
        await self._gate.enter()
        if self._unready:
            raise RuntimeError(self._unready)
        if self._asleep:
            released = sorted({KV_CACHE, WEIGHTS} & self.occupation.state.released)
            raise RuntimeError(f"the engine's memory is released ({', '.join(released)}): resume it first")
        request = GenerateReqInput(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        answers = await anext(self.tokenizer_manager.generate_request(request, None))
        return [_answered(answer) for answer in answers]

    async def abort(self) -> None:
        """Ends all requests."""
        self.tokenizer_manager.abort_request(abort_all=True)


def _answered(answer: dict[str, Any]) -> Answered:
    meta = answer["meta_info"]
    return answer["output_ids"], [item[0] for item in meta["output_token_logprobs"]], meta["finish_reason"]["type"]


def _receive(connection: Connection, inbox: asyncio.Queue[Any], loop: asyncio.AbstractEventLoop) -> None:
    """Puts every call into the inbox, and ``None`` behind the last one."""
    call: Any = ()
    while call is not None:
        try:
            call = connection.recv()
        except (EOFError, OSError):
            call = None
        loop.call_soon_threadsafe(inbox.put_nowait, call)


async def _serve(server: LocalServer, connection: Connection) -> None:
    """Answers calls until the script is gone; those under way do not wait for each other."""
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_receive, args=(connection, inbox, loop), daemon=True).start()
    under_way = set()
    while (call := await inbox.get()) is not None:
        task = asyncio.ensure_future(_answer(server, connection, *call))
        under_way.add(task)
        task.add_done_callback(under_way.discard)


async def _answer(server: LocalServer, connection: Connection, number: int, method: str, arguments: Any) -> None:
    answer: tuple[int, Exception | None, Any]
    try:
        answer = number, None, await getattr(server, method)(*arguments)
    except Exception as error:
        answer = number, _plain(error), None
    connection.send(answer)


def _plain(error: Exception) -> Exception:
    """The error as one of Python's own, which the script's process surely knows."""
    kind = next(kind for kind in (ValueError, TimeoutError, RuntimeError, Exception) if isinstance(error, kind))
    return (kind if kind is not Exception else RuntimeError)(str(error) or repr(error))


def main() -> None:
    """The process: launches SGLang, says so, answers calls, ends SGLang."""
    connection = Connection(int(sys.argv[1]))
    try:
        server = LocalServer(*connection.recv())
    except BaseException as error:
        traceback.print_exc()
        connection.send((0, RuntimeError(f"SGLang could not be launched: {error!r}"), None))
        return
    connection.send((0, None, None))
    try:
        server.engine.loop.run_until_complete(_serve(server, connection))
    finally:
        server.engine.shutdown()


if __name__ == "__main__":
    main()
