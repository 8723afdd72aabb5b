# SPDX-License-Identifier: Apache-2.0
"""A trainer's own stream: what it yields is let go of after a sync, also after one that broke off."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import torch

from verl_sync_plugin.trainers.megatron.stream import StreamSource
from verl_sync_plugin.trainers.wire import WirePolicy


def test_a_stream_that_was_broken_off_is_ended_and_its_tensors_go() -> None:
    yielded: list[weakref.ref[torch.Tensor]] = []
    ended: list[bool] = []

    def stream(afresh: bool) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for name in "abc":
                tensor = torch.ones(4)
                yielded.append(weakref.ref(tensor))
                yield name, tensor
        finally:
            ended.append(True)

    source = StreamSource(stream, WirePolicy(torch.bfloat16), 5)
    shards = source.shards()
    for sync in (1, 2, 3):
        source.shards()
        assert len(list(source.prepare((0, 1)))) == 1, "the ranks settle before it goes on"
        assert torch.equal(shards[1].local(), torch.ones(4))
        assert len(ended) == sync, "only the streams before this one have ended"
        source.release()
        gc.collect()
        assert len(ended) == sync + 1
        assert not [each for each in yielded if each() is not None], "tensors are held between syncs"
