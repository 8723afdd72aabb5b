# SPDX-License-Identifier: Apache-2.0
"""Where an engine rank finds the segments of a bucket that lies in the slots of several trainer ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl_sync_plugin.transport.protocol import Hello, Manifest


def spread(manifest: Manifest, bucket: int) -> int:
    """Bytes per segment of a bucket whose segments are in the slots of several ranks; 0 when one has all."""
    return manifest.segments[bucket] if manifest.sharded and manifest.worlds[bucket] > 1 else 0


def segments(hello: Hello, slots: Sequence[torch.Tensor], nbytes: int) -> list[torch.Tensor]:
    """All segments of a bucket, in their order: uint8 of shape ``(nbytes,)`` each, views.

    Args:
        hello: tells where they are.
        slots: of each of its stagings the slot with the bucket.
        nbytes: bytes per segment.
    """
    return [slots[staging].narrow(0, number * nbytes, nbytes) for staging, number in hello.homes]


def near(hello: Hello) -> frozenset[int]:
    """The segments that are read on the engine rank's own device."""
    if not hello.homes:  # parameters are read where they lie
        return frozenset((hello.place,) if beside(hello) else ())
    return frozenset(segment for segment, (staging, _) in enumerate(hello.homes) if staging == hello.own)


def beside(hello: Hello) -> bool:
    """Whether what all ranks hold is read on the engine rank's own device."""
    return hello.own == hello.place
