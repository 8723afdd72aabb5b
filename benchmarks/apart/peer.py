# SPDX-License-Identifier: Apache-2.0
"""awex's transfer from a Megatron model on the first GPU into an SGLang engine on the second, by its public calls.

Its first exchange makes the plan and the NCCL group; the later ones convert, send and receive alone. What release 0.9.0
lacks for SGLang 0.5.12, for Qwen2 and for Megatron's own layers is added from outside, in four places.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.transfer.peer import hash_of

NAME = "awex"
ARCHITECTURE = "Qwen2ForCausalLM"
LIMIT_SECONDS = 180.0
_OPTIONS: dict[str, Any] = {
    "attention_backend": "triton", "base_gpu_id": 1, "mem_fraction_static": 0.3, "disable_cuda_graph": True,
}  # fmt: skip


def prepare() -> None:
    """Before this process has any NCCL communicator: both ends need the same variables."""
    os.environ.update(NCCL_CUMEM_ENABLE="0", NCCL_NVLS_ENABLE="0", AWEX_MASTER_ADDR="127.0.0.1", DEVICE="0")


def _register() -> None:
    """Has awex treat Qwen2, which it does not list, as the dense Qwen3, whose converters also know biases."""
    from awex.models.registry import ModelRegistry

    ModelRegistry.models[ARCHITECTURE] = {**ModelRegistry.models["Qwen3ForCausalLM"], "mcore_converter": _converter}


def _converter() -> type:
    """awex's converter of a trainer's weights, which also knows the norm that Megatron's own layers keep apart."""
    from awex.models.registry import ModelRegistry

    class Converter(ModelRegistry.models["Qwen3ForCausalLM"]["mcore_converter"]()):  # type: ignore[misc]
        def convert_param(self, name: str, parameter: Any, vp_stage: int | None = None) -> Any:
            name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
            return super().convert_param(name, parameter, vp_stage=vp_stage)

    return Converter


def _in_worker(task: Callable[..., Any], config: Any, **given: Any) -> Any:
    """Runs awex's task in SGLang's scheduler with what awex's reader expects there and its hooks leave out."""
    from awex import logging

    logging.setLevel("WARNING")
    _register()
    given["model_context"]["infer_engine_config"] = config
    return task(**given)


class Awex:
    """awex's writer in this process and its reader in an SGLang engine that this starts.

    Args:
        trained: verl's Megatron training engine of one rank; ``torch.distributed`` has NCCL for what is on the device.
        model: folder of its Hugging Face configuration.
    """

    def __init__(self, trained: Any, model: Path) -> None:
        import sglang
        from awex import logging
        from awex.config import InferenceConfig
        from awex.engine.mcore import MegatronEngine
        from awex.engine.sglang import SGLangEngine, install_sglang_worker_hooks
        from awex.meta.meta_server import MetaServer
        from awex.util.common import get_free_port
        from transformers import AutoConfig

        class Reader(SGLangEngine):  # type: ignore[misc]
            def execute_task_in_model_worker(self, fn: Callable[..., Any], **given: Any) -> Any:
                return super().execute_task_in_model_worker(partial(_in_worker, fn, self.config), **given)

        logging.setLevel("WARNING")
        _register()
        terminated = signal.getsignal(signal.SIGTERM)
        meta = MetaServer("127.0.0.1", get_free_port())  # a thread: nothing is left behind where this process is ended
        meta.start()
        address = ":".join(map(str, meta.get_address_and_port()))
        install_sglang_worker_hooks()
        self._engine = sglang.Engine(
            model_path=str(model), load_format="dummy", skip_tokenizer_init=True, sampling_backend="pytorch",
            grammar_backend="none", log_level="warning", random_seed=1, **_OPTIONS,
        )  # fmt: skip
        config = AutoConfig.from_pretrained(model)
        settings = InferenceConfig.from_sgl_engine(self._engine, comm_backend="nccl", meta_server_addr=address)
        self._reader = Reader(settings, self._engine)
        self._reader.hf_config = config  # SGLang 0.5.12 gives it one of its own kind, which cannot be sent
        self._reader.initialize()
        signal.signal(signal.SIGTERM, terminated)  # SGLang's would keep a time limit from ending this process
        self._writer = MegatronEngine({"meta_server_addr": address, "comm_backend": "nccl"}, config, trained.module)
        self._writer.initialize()
        self._frozen = False

    def sync(self) -> dict[str, Any]:
        """One whole exchange.

        Raises:
            TimeoutError: it hangs; this process is ended a little later, as its device may never become free again.
        """
        ends = {"writer_seconds": self._writer.write_weights, "reader_seconds": self._reader.update_weights}
        futures = {name: _started(call) for name, call in ends.items()}
        done, waiting = wait(futures.values(), LIMIT_SECONDS, FIRST_EXCEPTION)
        for future in done:
            future.result()
        if waiting:
            faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)
            raise TimeoutError(f"awex did not end within {LIMIT_SECONDS:.0f} s: {len(waiting)} of its two ends wait")
        self._freeze()
        return {name: round(future.result(), 6) for name, future in futures.items()}

    def _freeze(self) -> None:
        """Each end collects garbage in every exchange, for as long as there is much in its process that is not awex's;
        so what is there after the first one is left out of that."""
        if not self._frozen:
            gc.freeze()
            self._reader.execute_task_in_model_worker(lambda **given: gc.freeze())
            self._frozen = True

    def tokens(self) -> list[int]:
        """Greedy tokens of a fixed prompt: the same for the same weights, and as those of ``server.Client``."""
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        return list(self._engine.generate(input_ids=list(range(100, 132)), sampling_params=sampling)["output_ids"])

    def digest(self) -> str:
        """One hash of SGLang's own checksums of all its parameters, as ``transfer.peer.digest`` of a server."""
        ranks = self._reader.execute_task_in_model_worker(
            lambda **given: given["model_runner"].check_weights("checksum")
        )
        return hash_of([rank["checksums"] for rank in ranks])

    def close(self) -> None:
        """Ends the engine, with its device memory."""
        self._engine.shutdown()


def _started(call: Callable[[], Any]) -> Future[float]:
    """Times a call in a thread that does not keep this process alive."""
    import torch

    future: Future[float] = Future()

    def run() -> None:
        try:
            if torch.cuda.is_available():
                torch.cuda.set_device(0)
            started = time.perf_counter()
            call()
            future.set_result(time.perf_counter() - started)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
