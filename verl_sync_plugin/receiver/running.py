# SPDX-License-Identifier: Apache-2.0
"""The loads of one sync whose copies may still run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.transport.channel import Channel, ChannelTimeoutError
from verl_sync_plugin.transport.protocol import Loaded


class Running:
    """Loads whose copies still run. The sender may overwrite a slot as soon as it hears ``Loaded``, so that is said
    only after the copies have completed; meanwhile the next load is started, so that the device never waits for us."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self._channel = channel
        self._cuda = device.type == "cuda"
        self._started: deque[tuple[int, float, torch.cuda.Event]] = deque()
        self._idle_since = time.perf_counter()

    @contextmanager
    def loading(self, bucket: int) -> Iterator[None]:
        """Around the start of one bucket's copies, on the current stream."""
        started = time.perf_counter()
        yield
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
            self._started.append((bucket, started, event))
        else:
            self._say(bucket, started)

    def receive(self, timeout: float) -> object:
        """The next word of the sender; completed loads are reported while there is none.

        Raises:
            ChannelTimeoutError: the copies of a load do not end, or the sender is silent.
        """
        deadline = time.monotonic() + timeout
        while self._started and not self._channel.has_word():
            if self._started[0][2].query():
                self._say(*self._started.popleft()[:2])
            elif time.monotonic() > deadline:
                raise ChannelTimeoutError(
                    f"the copies of a bucket did not complete within {KEY_PREFIX}.timeout_seconds={timeout:g}"
                )
        return self._channel.receive(timeout)

    def _say(self, bucket: int, started: float) -> None:
        now = time.perf_counter()
        started, self._idle_since = max(started, self._idle_since), now
        self._channel.send(Loaded(bucket, now - started, started))
