# SPDX-License-Identifier: Apache-2.0
"""NCCL connects ranks in the first transfer between them; here that has a bound.

It makes the communicator of a group in the group's first call, and connects two ranks in each direction in the first
transfer between them. The host waits in there, and nothing ends that wait where one of the ranks has died before.
On an H100 both were seen to end with the bound, and the next group to be whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

import torch

from verl_sync_plugin.config.settings import KEY_PREFIX

T = TypeVar("T")


def _nothing() -> None:
    pass


class Connecting:
    """Of one group: makes every call that connects ranks in a thread of its own, and leaves it alone behind the bound.

    What such a call has left half done in its thread (NCCL counts open calls per thread) ends with that, too.

    Args:
        seconds: the bound.
        late: called where such a call ends behind the bound after all, from its thread or from the caller's: ends what
            it has made. It may be called twice.
    """

    def __init__(self, seconds: float, late: Callable[[], None] = _nothing) -> None:
        self._seconds = seconds
        self._late = late
        self._connected: set[Hashable] = set()

    def call(self, start: Callable[[], T], links: set[Hashable], device: torch.device) -> T:
        """What ``start()`` returns, on the device and the stream of the caller.

        Args:
            start: issues transfers, and does not wait for them.
            links: between which ranks these are; on a CPU they have always been connected.
            device: where they compute.

        Raises:
            RuntimeError: they were not connected within the bound, or what ``start`` raises.
        """
        if device.type != "cuda" or links <= self._connected:
            return start()
        made = self._bounded(start, device)
        self._connected |= links
        return made

    def _bounded(self, start: Callable[[], T], device: torch.device) -> T:
        done: Future[T] = Future()
        given_up = threading.Event()
        stream = torch.cuda.current_stream(device)

        def run() -> None:
            try:
                with torch.cuda.device(device), torch.cuda.stream(stream):
                    made = start()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(made)
            if given_up.is_set():
                self._late()

        threading.Thread(target=run, name="verl-sync-connecting", daemon=True).start()
        try:
            return done.result(self._seconds)
        except FutureTimeoutError:
            given_up.set()
            if done.done():
                self._late()
            raise RuntimeError(
                f"NCCL did not connect this rank with the others within {KEY_PREFIX}.timeout_seconds="
                f"{self._seconds:g}; look for a rank that died, or see by NCCL_DEBUG=INFO which network it takes"
            ) from None
