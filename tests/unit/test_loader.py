# SPDX-License-Identifier: Apache-2.0
"""The loader follows only who launched its engine; the whole way through SGLang is in ``bare_engine``."""

import io
import sys
import uuid
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from ray import cloudpickle
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.common import SafeUnpickler

from verl_sync_plugin.rollouts.sglang import loader
from verl_sync_plugin.rollouts.sglang.loader import wait_for_forwards
from verl_sync_plugin.rollouts.sglang.request import TOKEN_VARIABLE, dumps, hand_down, new_token, pack_request
from verl_sync_plugin.rollouts.sglang.server import SyncSGLangHttpServer, server_of_one_engine
from verl_sync_plugin.transport import protocol
from verl_sync_plugin.transport.channel import Listener
from verl_sync_plugin.transport.protocol import LoadRequest

WAIT = 10.0


class Model(torch.nn.Module):
    """Fails when it is touched."""

    def load_weights(self, weights: Any) -> None:
        raise AssertionError("the model was touched")


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process launches an engine and is a process of it as well."""
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    hand_down(new_token())
    monkeypatch.setattr(loader, "tensor_parallel_rank", lambda: 0)
    monkeypatch.setattr(loader, "_sessions", {})


def asked(*addresses: str) -> Any:
    """A request as SGLang hands it to the loader."""
    return MultiprocessingSerializer.deserialize(pack_request(LoadRequest("1", addresses, WAIT).to_wire()))


def test_images_that_were_seen_before_a_sync_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang keeps what its vision tower made of them, since 0.5.18 in another module."""
    from sglang.srt.managers import mm_utils
    from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

    since, session, listener = Mock(), Mock(), Listener(WAIT, f"@verl-sync-{uuid.uuid4()}")
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.mm_schedule", SimpleNamespace(embedding_cache=since))
    mm_utils.init_mm_embedding_cache(1 << 20)
    mm_utils.embedding_cache.set(1, EmbeddingResult(embedding=torch.ones(4, 16)))
    monkeypatch.setattr(loader, "SGLangModel", Mock())
    monkeypatch.setattr(loader, "ReceiverSession", session)
    loader.load(Model(), asked(listener.address))
    assert session.called and since.clear.called and not mm_utils.embedding_cache.has(1)


@pytest.mark.parametrize(
    ("own", "given"),
    [(new_token(), None), (None, ()), (None, (None,)), ("", ("",)), (None, "model.weight")],
    ids=["another server's", "none", "no text", "not launched by us", "not a request"],
)
def test_any_other_request_is_refused_without_touching_the_model(
    own: str | None, given: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``given`` takes the place of the request's token."""
    sessions, listener = Mock(), Listener(WAIT, f"@verl-sync-{uuid.uuid4()}")
    monkeypatch.setattr(loader, "ReceiverSession", sessions)
    ((header, empty),) = asked(listener.address)
    if own is not None:
        monkeypatch.setenv(TOKEN_VARIABLE, own)
    token = header[-1]
    header = (*header[:-1], *given) if isinstance(given, tuple) else given or header
    loader.load(Model(), [(header, empty)])
    said = capsys.readouterr().out
    assert "a weight update was refused: the request does not come from the server that launched" in said
    assert token not in said and listener.accept(0) is None and not sessions.called


def test_a_rank_that_cannot_come_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model, scale = Model(), torch.nn.Parameter(torch.tensor(-7.0), requires_grad=False)
    model.attention = torch.nn.Module()
    model.attention.k_scale, model.attention.k_scale_float = scale, 1.0
    loader.load(model, asked("@nobody"))
    assert scale == 1.0, (
        "SGLang >= 0.5.21 reads it at the end of each load, and released memory comes back with anything"
    )
    monkeypatch.setattr(protocol, "PROTOCOL_VERSION", -1)
    other = asked("@nobody")
    monkeypatch.undo()
    monkeypatch.setenv(TOKEN_VARIABLE, other[0][0][-1])
    monkeypatch.setattr(loader, "tensor_parallel_rank", lambda: 3)
    loader.load(Model(), other)
    said = capsys.readouterr().out
    assert "engine rank 0 could not reach its trainer rank" in said and "nobody listens at @nobody" in said
    assert "engine rank 3 could not reach" in said and "Trainer and engine must run the same version" in said


def test_the_servers_of_all_hosts_of_an_engine_hold_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl sends the class to each host; it is a new one in every process."""
    first, second = server_of_one_engine(), server_of_one_engine()
    assert first.engine_token != second.engine_token != ""
    sent = cloudpickle.dumps(first)
    for known in ("CLASS", "ID"):  # as in a process that has never seen the class
        monkeypatch.setattr(cloudpickle.cloudpickle, f"_DYNAMIC_CLASS_TRACKER_BY_{known}", {})
    host = cloudpickle.loads(sent)
    assert host is not first and issubclass(host, SyncSGLangHttpServer)
    assert host.engine_token == first.engine_token


@pytest.mark.parametrize("foreign", [False, True])
def test_sglang_unpickles_tensors_by_value(foreign: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another function stands in torch's place, as ``megatron.core.safe_globals`` has it."""

    def safe_load(content: bytes) -> Any:
        return torch.load(io.BytesIO(content), weights_only=True)

    if foreign:
        monkeypatch.setattr(torch.storage, "_load_from_bytes", safe_load)
    held = torch.storage._load_from_bytes
    packed = dumps([("name", torch.arange(6, dtype=torch.bfloat16).view(2, 3)), ("empty", torch.empty(0))])
    assert torch.storage._load_from_bytes is held and b"test_loader" not in packed
    (name, tensor), (_, empty) = SafeUnpickler(io.BytesIO(packed)).load()
    assert name == "name" and tensor.dtype == torch.bfloat16 and tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert empty.numel() == 0


CYCLES = 1_000_000_000  # a good half second of a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_are_written_only_when_a_forward_pass_on_another_stream_has_read_them() -> None:
    """An engine that is paused with requests inside may still compute a forward pass, on a stream of its own."""
    model = torch.nn.Linear(512, 512, device="cuda")
    before, read, forwards = model.weight.detach().clone(), torch.empty_like(model.weight), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(forwards), torch.no_grad():
        torch.cuda._sleep(CYCLES)
        read.copy_(model.weight)
    assert not forwards.query(), "it still runs"
    wait_for_forwards(model)
    model.weight.data.zero_()
    torch.cuda.synchronize()
    assert torch.equal(read, before)
