# SPDX-License-Identifier: Apache-2.0
"""Messages as bytes: every kind comes back as it was, typed, and nothing else is accepted."""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from manifests import manifest

from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.transport import codec, proof, protocol
from verl_sync_plugin.transport.codec import BadMessageError, decode, encode_into
from verl_sync_plugin.transport.memory.exports import Live, Region, StagingExport

# What torch's _share_cuda_() makes of a storage: device, memory, size, offset, counter, its offset, event, and whether
# to wait for that
SHARED = ("GPU-0", b"\x00\xff" * 33, 1 << 40, 512, b"/torch_1_2_3", 7, b"\x80" * 64, True)
STAGING = StagingExport("cuda_ipc", "key", 1 << 40, SHARED, 1 << 39)
REGION = Region("cuda_ipc", "key-1", (1 << 63) - 1, (b"\x00" * 64,))
READINGS = ((1 << 40, (Run(0, 0, 16), Run(64, 0, 32, 9, 128)), (1, 2, 3)), (0, (), ()))
COVERAGE = protocol.Coverage(9, (("a.weight", 0, 1 << 40),))
MESSAGES = [
    protocol.Join("7 (step 3) once more"),
    protocol.Hello("1", "digest", (STAGING, STAGING), 1, False, True, (3, 1), ("a", "b"), True),
    protocol.Ready(True, "PermissionError: ü", True),
    protocol.Whereabouts((Live("key", (REGION, Region("shared_file", "/a", 1, ("/a",))), (b"\x01" * 40, b"")),)),
    manifest(2, 3),
    protocol.Used("LlamaForCausalLM", READINGS),
    protocol.Load(protocol.ALL, 0),
    protocol.Loaded(3, 0.25, 17.5),
    protocol.Commit(True),
    protocol.Committed(
        protocol.Coverage(9, (("a.weight", 0, 1 << 40),)),
        1,
        2,
        3,
        4,
        b"\xff" * 8,
        READINGS,
        "why",
        5,
        protocol.Used("", None),
    ),
    proof.Proven(
        b"\x01" * 16,
        ((96, ((Run(0, 0, 16),), ()), (1, 2)),),
        (("a", "why"),),
        (("b", 1, 2),),
        ((3, "bfloat16"),),
        7,
        ("c",),
    ),
    protocol.Failed("a\nb"),
]


def encoded(message: Any) -> bytearray:
    buffer = bytearray(b"1234")
    encode_into(message, buffer, 4)
    assert buffer[:4] == b"1234"
    return buffer[4:]


def test_every_kind_of_message_is_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(codec.MESSAGES)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message: Any) -> None:
    back = decode(memoryview(encoded(message)))
    assert type(back) is type(message) and back == message
    assert repr(back) == repr(message), "True is not 1, and a tuple is no list"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_that_is_cut_is_none(message: Any) -> None:
    whole = encoded(message)
    for end in {0, 1, len(whole) // 2, len(whole) - 1}:
        with pytest.raises(BadMessageError):
            decode(memoryview(whole)[:end])


def test_a_message_of_other_types_is_none() -> None:
    wrong: Any = protocol.Load("one", 2)  # type: ignore[arg-type]
    with pytest.raises(BadMessageError, match="not a Load"):
        decode(memoryview(encoded(wrong)))


class Bomb:
    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return pytest.fail, ("a message was unpickled",)


def test_a_pickle_does_nothing() -> None:
    for data in (pickle.dumps(Bomb()), bytes((0,)) + pickle.dumps(Bomb())):
        with pytest.raises(BadMessageError):
            decode(memoryview(data))


@contextmanager
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def best_of(times: int, act: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def test_a_large_manifest_is_no_slower_than_a_pickle() -> None:
    large = manifest(64, 8, 32)
    data, pickled = encoded(large), pickle.dumps(large)
    with no_collection():
        assert best_of(5, lambda: encoded(large)) < 1.2 * best_of(5, lambda: pickle.dumps(large))
        assert best_of(5, lambda: decode(memoryview(data))) < 1.2 * best_of(5, lambda: pickle.loads(pickled))
