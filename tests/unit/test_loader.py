# SPDX-License-Identifier: Apache-2.0
"""The loader follows only who launched its engine; the whole way through SGLang is in ``bare_engine``."""

from __future__ import annotations

import io
import subprocess
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
from verl_sync_plugin.rollouts.sglang.server import server_of_one_engine
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


class Tower(torch.nn.Module):
    """A vision tower; SGLang's own code computes and keeps what it makes of images."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 16, bias=False)

    def encode(self, items: list[Any]) -> torch.Tensor:
        return torch.cat([self.linear(item.feature) for item in items])

    def asked_for(self, seed: int) -> torch.Tensor:
        """The embeddings of an image, as a request with it gets them."""
        from sglang.srt.managers import mm_utils
        from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

        pixels = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        image = MultimodalDataItem(modality=Modality.IMAGE, feature=pixels, hash=seed)
        found = mm_utils._get_chunked_embedding_by_item(self.encode, [image], [(0, 3)], 0, 4, torch.device("cpu"))
        assert found is not None
        return found.clone()


@torch.no_grad()
def test_an_image_that_was_seen_before_a_sync_is_computed_with_the_new_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers import mm_utils

    tower, since = Tower(), Mock()
    mm_utils.init_mm_embedding_cache(1 << 20)
    moved = SimpleNamespace(embedding_cache=since)  # where SGLang keeps it since 0.5.18
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.mm_schedule", moved)
    before = tower.asked_for(1)
    assert torch.equal(tower.asked_for(1), before)
    listener, session = Listener(WAIT, f"@verl-sync-{uuid.uuid4()}"), Mock()
    session.return_value.run = lambda channel, request: tower.linear.weight.data.add_(1.0)
    monkeypatch.setattr(loader, "SGLangModel", Mock())
    monkeypatch.setattr(loader, "ReceiverSession", session)
    loader.load(tower, asked(listener.address))
    after = tower.asked_for(1)
    mm_utils.init_mm_embedding_cache(1 << 20)
    assert torch.equal(after, tower.asked_for(1)) and not torch.equal(after, before)
    since.clear.assert_called_once_with()


@pytest.mark.parametrize("case", ["another server's", "none", "no text", "not launched by us", "not a request"])
def test_any_other_request_is_refused_without_touching_the_model(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions = Mock()
    monkeypatch.setattr(loader, "ReceiverSession", sessions)
    listener = Listener(WAIT, f"@verl-sync-{uuid.uuid4()}")
    request = asked(listener.address)
    ((header, empty),) = request
    if case == "another server's":
        monkeypatch.setenv(TOKEN_VARIABLE, new_token())
    elif case == "none":
        request = [(header[:-1], empty)]
    elif case == "no text":
        request = [((*header[:-1], None), empty)]
    elif case == "not launched by us":
        monkeypatch.delenv(TOKEN_VARIABLE)
        request = [((*header[:-1], ""), empty)]
    else:
        request = [("model.weight", empty)]
    loader.load(Model(), request)
    said = capsys.readouterr().out
    assert "a weight update was refused: the request does not come from the server that launched" in said
    assert header[-1] not in said
    assert listener.accept(0) is None and not sessions.called


def test_an_engine_rank_that_cannot_come_says_why_in_its_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loader.load(Model(), asked("@nobody"))
    monkeypatch.setattr(protocol, "PROTOCOL_VERSION", -1)
    other = asked("@nobody")
    monkeypatch.undo()
    monkeypatch.setenv(TOKEN_VARIABLE, other[0][0][-1])
    monkeypatch.setattr(loader, "tensor_parallel_rank", lambda: 3)
    loader.load(Model(), other)
    said = capsys.readouterr().out
    assert "engine rank 0 could not reach its trainer rank" in said and "nobody listens at @nobody" in said
    assert "engine rank 3 could not reach" in said and "Trainer and engine must run the same version" in said


SERVER = """
import sys
from ray import cloudpickle
server = cloudpickle.loads(sys.stdin.buffer.read())
from verl_sync_plugin.rollouts.sglang.server import SyncSGLangHttpServer
assert issubclass(server, SyncSGLangHttpServer)
print(server.engine_token)
"""


def test_the_servers_of_all_hosts_of_an_engine_hold_one_token() -> None:
    """verl sends the class to each host; it is a new one in every process."""
    first, second = server_of_one_engine(), server_of_one_engine()
    assert first.engine_token != second.engine_token != ""
    sent = cloudpickle.dumps(first)
    host = subprocess.run([sys.executable, "-c", SERVER], input=sent, capture_output=True, check=True)
    assert host.stdout.decode().strip().splitlines()[-1] == first.engine_token


def replaced(content: bytes) -> Any:
    """Stands in torch's place, as ``megatron.core.safe_globals.safe_load_from_bytes`` does."""
    return torch.load(io.BytesIO(content), weights_only=True)


@pytest.mark.parametrize("foreign", [False, True])
def test_sglang_unpickles_tensors_by_value(foreign: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if foreign:
        monkeypatch.setattr(torch.storage, "_load_from_bytes", replaced)
    held = torch.storage._load_from_bytes
    packed = dumps([("name", torch.arange(6, dtype=torch.bfloat16).view(2, 3)), ("empty", torch.empty(0))])
    assert torch.storage._load_from_bytes is held
    assert b"test_loader" not in packed
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
