# SPDX-License-Identifier: Apache-2.0
"""The whole phase of one trainer rank and one engine rank in one process, without SGLang's processes and Ray.

Adapter, sharding manager, endpoint, server, loader and session are the product's own. What SGLang's tokenizer manager
would have a scheduler do is done here in a thread; its memory is only noted.
"""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.utils import MultiprocessingSerializer
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode

from faults.actor import Reference, worker_calls
from verl_sync_plugin.config.settings import sync_config_of
from verl_sync_plugin.layout.tensors import Base, Shard, View
from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.rollouts.adapter import calls_of
from verl_sync_plugin.rollouts.sglang import loader
from verl_sync_plugin.rollouts.sglang.adapter import SyncServerAdapter
from verl_sync_plugin.rollouts.sglang.request import hand_down, new_token
from verl_sync_plugin.rollouts.sglang.server import SyncSGLangHttpServer
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.trainers.base import ParameterSource, ShardStream, TrainerBackend, dtype_name

CPU = torch.device("cpu")
SIZES = {"a.weight": (40, 30), "b.weight": (7,), "c.q.weight": (20, 30), "c.k.weight": (10, 30)}
BUCKET_BYTES = 3000
TIMEOUT = 20.0


class Model(torch.nn.Module):
    """An engine's model, which fuses two tensors of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("a", (40, 30)), ("b", (7,)), ("c", (30, 30))):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))

    def load_weights(self, weights: Any) -> None:
        rows = {"c.q.weight": slice(0, 20), "c.k.weight": slice(20, 30)}
        for name, tensor in weights:
            target = getattr(self, name.split(".")[0])
            (target[rows[name]] if name in rows else target).copy_(tensor)

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        fused = torch.cat([weights["c.q.weight"], weights["c.k.weight"]])
        return all(map(torch.equal, (self.a, self.b, self.c), (weights["a.weight"], weights["b.weight"], fused)))


class Source(ParameterSource):
    """Parameters of a trainer of one rank, in memory that the engine rank can map."""

    policy: Any

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.weights = {name: torch.randn(shape) for name, shape in SIZES.items()}
        self.move()

    def move(self) -> None:
        """To other memory, as an offload would."""
        for name, tensor in self.weights.items():
            path = self._folder / f"{uuid.uuid4().hex}.memory"
            storage = torch.UntypedStorage.from_file(str(path), True, tensor.nbytes)
            moved = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape)  # type: ignore[call-overload]
            self.weights[name] = moved.copy_(tensor)

    def shards(self) -> list[Shard]:
        return [self._shard(name, tensor) for name, tensor in self.weights.items()]

    def _shard(self, name: str, tensor: torch.Tensor) -> Shard:
        view = View(name, tuple(tensor.shape), 0, tensor.numel())
        base = Base(name, dtype_name(tensor.dtype), tensor.element_size(), (tensor.numel(),), (view,))
        return Shard(base, lambda: tensor.view(-1))


class Trainer(TrainerBackend):
    """Opens a ``Source`` and gives it the policy of dtypes."""

    def open_source(self) -> ParameterSource:
        self.engine.policy = self.policy
        return self.engine  # type: ignore[no-any-return]


class Manager(ShardingManager):
    backend = Trainer


class TokenizerManager:
    """Answers as SGLang's does; a load runs in a thread, as it would in the scheduler."""

    server_args = SimpleNamespace(tp_size=1, weight_version="")

    def __init__(self, model: Model) -> None:
        self._model = model
        self.released: set[str] = set()

    async def update_weights_from_tensor(self, obj: Any, request: None) -> tuple[bool, str]:
        assert "weights" not in self.released, "SGLang would write into memory that is not there"
        named = MultiprocessingSerializer.deserialize(obj.serialized_named_tensors[0])
        await asyncio.to_thread(loader.load, self._model, named)
        return True, ""

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        raise AssertionError("there is no scheduler that generates")
        yield

    async def flush_cache(self) -> Any:
        assert "kv_cache" not in self.released, "SGLang would crash (sglang #19029)"
        return SimpleNamespace(success=True)

    async def release_memory_occupation(self, obj: Any, request: None) -> None:
        assert not self.released & set(obj.tags), "the memory saver would end the process"
        self.released |= set(obj.tags)

    async def resume_memory_occupation(self, obj: Any, request: None) -> None:
        assert self.released >= set(obj.tags), "SGLang would raise KeyError"
        self.released -= set(obj.tags)


class Actor:
    """The handle of a server whose loop runs in a thread."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._ask(getattr(self._server, method)(*args)))

    def _ask(self, call: Any) -> Reference:
        reference = Reference()
        reference.answer = asyncio.run_coroutine_threadsafe(call, self._loop)
        return reference

    def wait(self, call: Any) -> Any:
        return self._ask(call).answer.result(TIMEOUT)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class OneProcess:
    """Trainer and engine; one per process at a time.

    Args:
        checkpoint: of any model that the configuration can be of.
        folder: for the trainer's memory.
        keys: of ``custom.sync``.
    """

    def __init__(
        self, checkpoint: str, folder: Path, model: type[Model] = Model, source: type[Source] = Source, **keys: Any
    ) -> None:
        os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1", CUDA_VISIBLE_DEVICES="")
        loader.tensor_parallel_rank = lambda: 0
        loader._sessions.clear()
        hand_down(new_token())
        sync = {"timeout_seconds": TIMEOUT, **keys}
        config = RolloutConfig(name="sglang", tensor_model_parallel_size=1, custom={"sync": sync}, max_model_len=64)
        model_config = HFModelConfig(path=checkpoint)
        self.model, self.source = model(), source(folder)
        self.server = SyncSGLangHttpServer(config, model_config, RolloutMode.HYBRID, [], 0, 0, 1, "", 0)
        self.server.tokenizer_manager = self.sglang = TokenizerManager(self.model)
        self.server.guard_requests()
        self.actor = Actor(self.server)
        mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "infer_tp", "infer_pp"))
        self.adapter = SyncServerAdapter(config, model_config, mesh)
        self.adapter.server_actor = self.actor
        leads = RolloutEndpoint(rollout_of("sglang"), calls_of(self.actor, ""), (0,), False, TIMEOUT, False)
        self.manager = Manager(self.source, leads, sync_config_of(config), BUCKET_BYTES, CPU)
        self.adapter._manager = self.manager
        self._version = 0

    def sync(self) -> None:
        self._version += 1
        asyncio.run(worker_calls(self.adapter, ShardStream(None, list), self._version))

    def train(self) -> None:
        for tensor in self.source.weights.values():
            tensor.add_(torch.randn_like(tensor))

    def sleep(self) -> None:
        self.actor.wait(self.server.sleep())

    def request(self) -> str:
        """Returns what a request would get now."""
        try:
            self.actor.wait(asyncio.wait_for(self.server.admit(), 0.05))
        except TimeoutError:
            return "a wait"
        except RuntimeError:
            return "a refusal"
        return "an answer"

    def close(self) -> None:
        self.manager.sender.close()
        self.manager.meeting.close()
        self.actor.close()
