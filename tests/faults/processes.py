# SPDX-License-Identifier: Apache-2.0
"""Defines the processes of the matrix: trainer ranks, and the server with its engine. Only Ray's handle is made up."""

import asyncio
import json
import os
import signal
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from verl.workers.config import HFModelConfig, RolloutConfig

from bare_engine import trainer
from faults import points
from faults.actor import Handle, serve, worker_calls
from faults.cells import GROUP_SECONDS, SLACK_SECONDS, T
from verl_sync_plugin.transport import agreement

BUCKET_BYTES, GATE_SECONDS = 40_000, 3.0
ARM = "faults.points.arm_engine"


def rollout_config(delivery: str) -> Any:
    custom = {"sync": {"timeout_seconds": T, "delivery": delivery, "verify": "always"}}
    as_by_the_driver = {"custom": custom, "multi_stage_wake_up": True}
    return RolloutConfig(name="sglang", tensor_model_parallel_size=2, max_model_len=64, **as_by_the_driver)


class Trainer:
    """A trainer rank. Its weights are one of two sets, "A" and "B"."""

    def __init__(self, rank: int, port: int, model: str, folder: str, server: Connection | None) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
        os.environ.update(MASTER_PORT=str(port), RAY_LOCAL_WORLD_SIZE="2")
        dist.init_process_group("cpu:gloo", rank=rank, world_size=2, timeout=timedelta(seconds=GROUP_SECONDS))
        self.trainer, self.model, self.folder = trainer.build(model, "fsdp2"), model, Path(folder)
        trainer.share(self.trainer, self.folder)
        self._states: dict[str, list[torch.Tensor]] = {}
        for seed, name in enumerate("AB"):
            trainer.perturb(self.trainer, seed, 0.005)
            self._states[name] = trainer.local_state(self.trainer)
        agreement.agreement_seconds = lambda seconds: 3 * seconds + SLACK_SECONDS
        self._model_config, self._adapter = HFModelConfig(path=model), None
        self._mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp", "infer_tp", "infer_pp"))
        self._handle = Handle(server) if server is not None else None
        self._place = "leader" if rank == 0 else "trainer"
        points.install(self._place)

    def begin(self, delivery: str) -> None:
        """A new adapter, whose next sync is its first."""
        # After the trainer's model: SGLang changes what transformers builds
        from verl_sync_plugin.rollouts.sglang.adapter import SyncServerAdapter

        if self._adapter is not None:
            self._adapter._manager.sender.close()
            self._adapter._manager.connection.close()
        self._adapter = SyncServerAdapter(rollout_config(delivery), self._model_config, self._mesh)
        self._adapter.find_server = lambda: self._handle
        manager = self._adapter._manager = self._adapter._make_manager(self._stream())
        manager._bucket_bytes = BUCKET_BYTES  # verl's key is in megabytes, and the model has one of these

    def _stream(self) -> Any:
        return self.trainer.get_per_tensor_param()[0]  # type: ignore[attr-defined]

    @torch.no_grad()
    def put(self, name: str) -> None:
        """Changes the weights in place, as a step of training does."""
        for local, kept in zip(trainer._local_weights(self.trainer), self._states[name], strict=True):
            local.copy_(kept)

    def holds(self, name: str) -> bool:
        """True if this rank's weights are that set, bit for bit."""
        return all(map(torch.equal, trainer.local_state(self.trainer), self._states[name]))

    def save(self, name: str) -> str:
        """Writes a checkpoint of a set; collective."""
        self.put(name)
        full, target = trainer.full_state(self.trainer), self.folder / f"checkpoint-{name}"
        if dist.get_rank() == 0:
            trainer.save(full, self.model, target)
        return str(target)

    def arm(self, stage: str, kind: str) -> None:
        points.arm(self._place, stage, kind)

    def fired(self) -> bool:
        return points.fired()

    def sync(self, version: int) -> str:
        """A sync of the worker's; returns how the delivery went."""
        assert self._adapter is not None
        asyncio.run(worker_calls(self._adapter, self._stream(), version))
        report = self._adapter._manager.report
        assert report.verified_tensors > 0 == report.not_comparable, "the engine's memory is not proven whole"
        return report.delivery


class Server:
    """The rollout server: its own class on a real engine of two ranks."""

    def __init__(self, model: str, folder: str, calls: Connection) -> None:
        os.environ.update(SGLANG_CPU_OMP_THREADS_BIND="0|1", CUDA_VISIBLE_DEVICES="")
        self.folder, self._model, self._calls = Path(folder), model, calls
        from bare_engine.endpoint import BareEngine

        self.bare = BareEngine(model, 2, loaders=(ARM,))
        self._references: dict[str, list[dict[str, torch.Tensor]]] = {}
        self.dumps = 0

    def learn(self, checkpoints: dict[str, str]) -> None:
        """Notes what the engine holds after its own load of each set; starts the server."""
        for name, path in checkpoints.items():
            self.bare.load_from_disk(path)
            self._references[name] = self._state()
        # SGLang ends its process by this signal when a scheduler dies. In an actor of Ray it can set no handler of its
        # own, for only a main thread may
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        self._serve()

    def _serve(self) -> None:
        import psutil
        from verl.workers.rollout.replica import RolloutMode

        from verl_sync_plugin.rollouts.sglang.server import SyncSGLangHttpServer

        points.install("server")
        config, model = rollout_config("auto"), HFModelConfig(path=self._model)
        self.server = SyncSGLangHttpServer(config, model, RolloutMode.HYBRID, [], 0, 0, 1, "", 0)
        self.server.tokenizer_manager = self.bare.engine.tokenizer_manager
        self.server.guard_requests()
        self.server._processes = psutil.Process().children(recursive=True)
        serve(self.server, self._calls, self.bare.engine.loop)

    def sleep(self) -> None:
        """verl's call before the trainer works."""
        self.bare.call(self.server.sleep())

    def arm(self, stage: str, kind: str) -> None:
        """Arms the engine; without a stage, it forgets every sync before."""
        self.bare.call(self.bare.ask_loader(ARM, json.dumps([stage, kind])))

    def arm_server(self, stage: str, kind: str) -> None:
        points.arm("server", stage, kind)

    def holds(self) -> str:
        """The set that the engine holds, on all its ranks bit for bit; else which parameters are of neither."""
        found = self._state()
        for name, reference in self._references.items():
            if all(torch.equal(f[key], r[key]) for f, r in zip(found, reference, strict=True) for key in r):
                return name
        return "a mixture"

    def _state(self) -> list[dict[str, torch.Tensor]]:
        self.dumps += 1
        return self.bare.state(self.folder / f"state{self.dumps}")

    def answers(self) -> str:
        """Sends a request; returns "an answer", "a refusal", or "no word" when nothing comes in time."""
        return str(self.bare.call(self._answer()))

    async def _answer(self) -> str:
        try:
            await asyncio.wait_for(self.server._gate.enter(), GATE_SECONDS)
        except TimeoutError:
            return "no word"
        except RuntimeError:
            return "a refusal"
        sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
        output = await self.server.generate(trainer.PROMPT, sampling, f"request-{self.dumps}")
        return "an answer" if output.token_ids else "no tokens"
