# SPDX-License-Identifier: Apache-2.0
"""A group of processes of two worlds: the trainer's ranks and the rollout ranks, which share no default group.

Words travel by gloo on the CPU, and so do the bytes of weights where the ranks compute on CPUs; else these go by NCCL,
in a group of their own, so that no word waits for them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.transport.agreement import Ranks
from verl_sync_plugin.transport.protocol import agreement_seconds

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class JointRanks(Ranks):
    """The trainer's ranks first, then the rollout ranks; or the trainer's ranks alone, who then exchange words only.

    Collective over all of them: makes the groups.

    Args:
        store, rank: as in ``Ranks``.
        trainers, rollouts: how many there are; no rollouts for the trainer's ranks alone.
        seconds: bound on NCCL's connecting of ranks, which come to that together; on every call ``agreement_seconds``.
        device: where this process computes.
    """

    after_loss = "the next sync forms a new group from the ranks that are alive then"

    def __init__(
        self, store: dist.Store, rank: int, trainers: int, rollouts: int, seconds: float, device: torch.device
    ) -> None:
        together, self._seconds = agreement_seconds(seconds), seconds
        super().__init__(rank, range(trainers), range(trainers, trainers + rollouts), store, together)
        self._bytes: Any = None
        self._met = False
        if rollouts and device.type == "cuda":
            # A thread that is left alone in NCCL may go on waiting for the store, which it must not keep from others
            own = store.clone()  # type: ignore[attr-defined]
            own.set_timeout(timedelta(seconds=seconds))
            self._bytes = _nccl(dist.PrefixStore("bytes", own), rank, self.size, together)
        elif rollouts:
            self._bytes = dist.ProcessGroupGloo(dist.PrefixStore("bytes", store), rank, self.size, self._bound)

    def broadcast(self, memory: torch.Tensor, root: int) -> dist.Work:
        """Starts to bring bytes of one rank into the same memory of all others; on a GPU after what the current stream
        holds by now, which does not wait for it. Raises RuntimeError where ranks were not connected within the bound;
        of those that die later the agreement hears."""
        self._meet(memory.device)
        return self._bytes.broadcast(memory, root)

    def _meet(self, device: torch.device) -> None:
        """Once for the group: has NCCL make its communicator, for which it wants all members in the first call."""
        group = self._bytes

        def meet() -> None:
            with torch.cuda.stream(torch.cuda.Stream(device)):  # the caller's does not wait for a member that dies
                group.broadcast(torch.zeros(1, device=device), 0).wait()

        if device.type == "cuda" and not self._met:
            bounded(meet, device, self._seconds, late=group.abort)
            self._met = True

    def close(self) -> None:
        self.end_bytes()
        super().close()

    def end_bytes(self) -> None:
        """Ends the group for bytes alone, with every transfer that is under way in it; not collective."""
        if self._bytes is not None:
            self._bytes.abort()
        self._bytes = None


def _nccl(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> Any:
    """A group without torch's watchdog: our own bound, the agreement and ``close`` end what hangs.

    At a dead member that watchdog sleeps a minute per call that failed, during which the group cannot be let go; and it
    tells all groups of the process, of which the first, the trainer's own, ends the process some minutes later. A group
    whose ``wait`` waits on the host has none.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=4 * timeout_seconds)
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"  # read by the constructor
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        os.environ.pop(BLOCKING_WAIT)
        if before is not None:
            os.environ[BLOCKING_WAIT] = before


def bounded(connect: Callable[[], None], device: torch.device, seconds: float, late: Callable[[], None]) -> None:
    """Connects ranks in a thread of its own, and leaves it alone after the bound.

    NCCL makes the communicator of a group in the group's first call. The host waits in there, and nothing ends that
    wait where one of the ranks has died before. What such a call has left half done in its thread (NCCL counts open
    calls per thread) ends with the thread, too. On an H100 this was seen to end with the bound, and the next
    group to be whole.

    ``connect`` issues the call, on the device and the stream of the caller. Where that ends after the bound all the
    same, ``late`` is called from its thread or the caller's, maybe twice: it ends what the call has made. Raises
    RuntimeError after the bound, or what ``connect`` raises.
    """
    done: Future[None] = Future()
    given_up = threading.Event()
    stream = torch.cuda.current_stream(device)

    def run() -> None:
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                connect()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)
        if given_up.is_set():
            late()

    threading.Thread(target=run, name="verl-sync-connecting", daemon=True).start()
    try:
        done.result(seconds)
    except TimeoutError:
        given_up.set()
        if done.done():
            late()
        raise RuntimeError(
            f"NCCL did not connect this rank with the others within {KEY_PREFIX}.timeout_seconds={seconds:g}; look for "
            "a rank that died, or set NCCL_DEBUG=INFO to see which network NCCL uses"
        ) from None
