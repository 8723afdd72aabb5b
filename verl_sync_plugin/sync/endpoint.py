# SPDX-License-Identifier: Apache-2.0
"""One trainer rank's view of its rollout engine, of no engine in particular, and the meeting of trainer ranks and
engine ranks: the load is asked for, awaited, or given up.

Every sync has a socket of its own on every rank, named by the agreement, the rank and the sync's number, and bound one
sync ahead: an engine rank of the next sync may come before its trainer rank has begun that, and one of a sync that was
given up is refused at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.log import say
from verl_sync_plugin.report import SyncReport, write_report
from verl_sync_plugin.sync.delivery import DeliveryRefusedError
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.channel import Channel, Listener
from verl_sync_plugin.transport.protocol import LoadRequest

if TYPE_CHECKING:
    from verl_sync_plugin.rollouts import Rollout

ACCEPT_SECONDS = 1.0
# Calls a method of the engine's server with arguments; returns at once. A call under way cannot be cancelled
Call = Callable[..., Future[Any]]


def call_under_way() -> Future[Any]:
    """A future of a call under way: who gives up waiting for it must not keep its answer from being taken in."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(eq=False)
class RolloutEndpoint:
    """Only the leader of an engine's ranks talks to the engine. What raises here raises RuntimeError when the engine
    refused, failed or has died, and TimeoutError when it did not answer in time.

    Args:
        engine: what is known of it; any rank may have it refuse something.
        call: on the leader; ``None`` on all other ranks.
        ranks: global ranks next to the engine's ranks, in tensor-parallel order; none for a trainer rank of a separate
            run, which refuses for the engine all the same.
        real_weights: the engine began with a checkpoint's, not with random ones.
        timeout_seconds: bound on every call.
        awake_after_load: nothing of the engine is left to be resumed once it has loaded.

    Attributes:
        name: of the engine, for messages.
        leader: this rank speaks for its engine.
    """

    engine: Rollout
    call: Call | None
    ranks: tuple[int, ...] = ()
    real_weights: bool = False
    timeout_seconds: float = 0.0
    awake_after_load: bool = True

    def __post_init__(self) -> None:
        self.name, self.leader = self.engine.ENGINE, self.call is not None

    def _start(self, method: str, *arguments: Any) -> Future[Any]:
        assert self.call is not None, "leader only"
        return self.call(method, *arguments)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        return await self.answered(self._start(method, *arguments))

    async def answered(self, answer: Future[Any]) -> Any:
        """Waits for the answer to a call."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), self.timeout_seconds)
        except TimeoutError as error:
            if answer.done():
                raise
            within = f"{self.timeout_seconds:g} s ({KEY_PREFIX}.timeout_seconds)"
            raise TimeoutError(f"{self.name} did not answer within {within}; see its log") from error

    async def resume(self, tags: list[str]) -> None:
        """Resumes what is released of ``tags``; harmless when nothing is."""
        await self._ask("resume_tags", tags)

    async def finish(self, tags: list[str]) -> None:
        """Resumes what is released of ``tags``, then flushes the prefix cache once."""
        await self._ask("finish_sync", tags)

    async def abandon(self, why: str) -> None:
        """Keeps the engine from generating until a sync succeeds, for one has failed. Raises nothing; on any rank."""
        if self.leader:
            try:
                await self._ask("abandon_sync", why)
            except Exception as error:
                say(f"could not tell the engine that the sync failed: {error!r}")

    async def publish(self, report: SyncReport) -> None:
        """Leaves a report where the trainer fetches it, in the log and in the report file. Raises nothing; on any rank.
        The weights are in place, and a lost report must not end the run."""
        if self.leader:
            try:
                await self._ask("put_sync_report", report.as_dict())
            except Exception as error:
                say(f"the report of this sync is lost: {error!r}")
            write_report(report)

    async def load_adapter(
        self, settings: Mapping[str, Any], factors: dict[str, torch.Tensor], weight_version: str | None
    ) -> tuple[float, int]:
        """Replaces the adapter that the engine serves: ``settings`` are fields of PEFT's ``LoraConfig``, which
        ``Rollout.refuse_adapter`` has accepted, ``factors``, on the host, have their names in an adapter checkpoint.
        Returns what ``start_load`` answers, and the bytes that travel. Raises ValueError, with setting and remedy,
        where the engine cannot serve it."""
        arguments, nbytes = self.engine.pack_adapter(settings, factors)
        return await self._ask("load_adapter", *arguments, weight_version), nbytes

    def start_load(self, request: LoadRequest, weight_version: str | None) -> Future[float]:
        """Has the engine call our loader on all its ranks; returns at once. It answers at the end of the load, with the
        seconds that it took to fall asleep before this sync (0.0 when unknown); before the commit that means that it
        failed."""
        return self._start("load_weights", request.to_wire(), weight_version)

    def flush_after_load(self) -> None:
        """All engine ranks are in the load. If none of the engine's memory is released then, it flushes its prefix
        cache as soon as it has left the load, for ``finish`` to find that done; returns at once."""
        if self.awake_after_load:
            self._start("flush_after_load")


class EngineConnection:
    """This rank's sockets, and the engine's load of the sync under way: ``pending``, on the leader (see
    ``RolloutEndpoint.start_load``). ``sender`` adopts the channel to the engine rank, which may take ``seconds`` to
    come. Constructed by all ranks together."""

    def __init__(self, agreement: Agreement, endpoint: RolloutEndpoint, sender: BucketSender, seconds: float) -> None:
        self._agreement = agreement
        self._endpoint = endpoint
        self._sender = sender
        self._seconds = seconds
        self._number = 0  # of the sync under way; the same on all ranks
        self._version: str | None = None  # of its weights, for the engine
        self._listener: Listener | None = None
        self._next: Listener | None = agreement.step("binding the first socket", lambda: self._listen(1))
        self.pending: Future[float] | None = None

    def _listen(self, number: int) -> Listener:
        return Listener(self._seconds, self._address(self._agreement.ranks.rank, number))

    def _address(self, rank: int, number: int) -> str:
        return f"@verl-sync-{self._agreement.name}-{rank}-{number}"

    def begin(self, global_steps: int | None) -> None:
        """Starts a new sync: opens its socket, and the next one's. ``global_steps`` is verl's weight version."""
        self._disconnect()
        self._number, self.pending = self._number + 1, None
        self._version = None if global_steps is None else str(global_steps)
        with self._agreement.attempt():
            self._listener, self._next = self._next or self._listen(self._number), None
            self._next = self._listen(self._number + 1)

    def ask(self) -> None:
        """Has the engine start to load. On the leader the engine has the request when this returns, unless this rank
        has failed: it may still be asleep."""
        with self._agreement.attempt():
            if self._endpoint.leader and not self._agreement.failed:
                addresses = tuple(self._address(rank, self._number) for rank in self._endpoint.ranks)
                # Each group counts from 1, and an engine rank may still be in one before
                sync_id = f"{self._number} (step {self._version}) of group {self._agreement.name}"
                self.pending = self._endpoint.start_load(LoadRequest(sync_id, addresses, self._seconds), self._version)

    async def connect(self, handshake: Callable[[], str], news: Callable[[], bool]) -> bool:
        """Waits for the engine rank in rounds, so that one rank's failure ends the wait of all, and greets it on the
        channel that the sender has adopted; collective. ``handshake`` returns why the engine rank refuses.
        Returns True if any rank has ``news`` then. Raises SyncError where any rank's engine rank did not come, or
        failed, and WayRefusedError where one cannot map the memory that it is to read; nothing was loaded then."""
        seconds, name = self._seconds, self._endpoint.name
        deadline, refusal = time.monotonic() + seconds, ""
        missing = bool(self._endpoint.ranks)  # the engine rank, where this rank has one
        waiting, again, refused, heard = 1, False, 0, 0
        while waiting:
            with self._agreement.attempt():
                if missing and not self._agreement.failed and (channel := self._accept()) is not None:
                    self._sender.use_channel(channel)
                    missing = False
                    refusal = handshake()
                if (missing or again) and self.pending is not None and self.pending.done():
                    await self._endpoint.answered(self.pending)
                    raise RuntimeError(f"{name} accepted the update but its loader did not connect; see {name}'s log")
                if missing and time.monotonic() > deadline:
                    raise TimeoutError(
                        f"the engine did not connect within {KEY_PREFIX}.timeout_seconds={seconds:g}; see {name}'s log"
                    )
            votes = [missing, bool(refusal), news()]
            waiting, refused, heard = self._agreement.vote("connecting to the engine", votes).tolist()
            again = True
        if refused:
            texts = self._agreement.gather("asking why the delivery is refused", refusal)
            raise DeliveryRefusedError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text))
        with self._agreement.attempt():
            if self._endpoint.leader:
                self._endpoint.flush_after_load()
        return bool(heard)

    async def give_up(self, why: str) -> None:
        """Ends the sync whatever its state: the engine leaves the load, and generates nothing until one succeeds."""
        self._disconnect()
        # Side by side: a server that is silent costs one bound, not two
        await asyncio.gather(self._endpoint.abandon(why), self._await_left())

    async def leave(self) -> None:
        """Ends a sync before its first load; returns when the leader's engine is ready for another one."""
        self._disconnect()
        with self._agreement.attempt():  # a cancellation is heard where the ranks settle next
            await self._await_left()

    async def _await_left(self) -> None:
        """Waits until the engine has left a load that was given up, so that the next sync finds it idle."""
        if self.pending is not None:
            try:
                await self._endpoint.answered(self.pending)
            except Exception as error:
                say(f"the engine ended the failed sync with {error!r}")

    def close(self) -> None:
        """Closes all sockets."""
        self._disconnect()
        if self._next is not None:
            self._next.close()

    def _disconnect(self) -> None:
        self._sender.hang_up()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _accept(self) -> Channel | None:
        """The engine rank's channel of this sync, if it comes within the time of a round."""
        assert self._listener is not None, "begun"
        channel = self._listener.accept(ACCEPT_SECONDS)
        if channel is not None:
            self._listener.close()
        return channel
