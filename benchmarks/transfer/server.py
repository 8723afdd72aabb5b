# SPDX-License-Identifier: Apache-2.0
"""A real SGLang HTTP server in processes of its own."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from verl_sync_plugin.rollouts.sglang.request import LOADER, hand_down, new_token

START_SECONDS = 240.0
_CUDA = (
    "--attention-backend triton --mem-fraction-static 0.5 --cuda-graph-bs 1 2 4 8 --disable-piecewise-cuda-graph "
    "--enable-memory-saver"
)
_CPU = (
    "--device cpu --attention-backend torch_native --mem-fraction-static 0.1 --disable-cuda-graph "
    "--disable-overlap-schedule --max-total-tokens 2048 --context-length 256"
)


class Client:
    """Whoever knows the port of a server, and the folder of its model's config.

    Attributes:
        adapter: generation is asked of this one, where SGLang serves any.
    """

    def __init__(self, port: int, model: Path) -> None:
        self.port, self.model = port, model
        self.adapter = ""

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One request on a connection of its own.

        Raises:
            RuntimeError: the server answered with an error.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {text[:500]!r}")
        return json.loads(text) if answer.headers.get_content_type() == "application/json" and text else None

    def tokens(self) -> list[int]:
        """Greedy tokens of a fixed prompt: the same for the same weights."""
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        adapter = {"lora_path": self.adapter} if self.adapter else {}
        body = {"input_ids": list(range(100, 132)), "sampling_params": sampling, **adapter}
        return list(self.ask("POST", "/generate", body)["output_ids"])


class Server(Client):
    """``sglang.launch_server`` with random weights; ended by ``stop``.

    Args:
        model: folder of the model's config.
        device: ``cuda`` or ``cpu``.
        log: where its output goes.
        options: further words of its command line.
        variables: further ones of its environment.
        loaders: custom weight loaders besides the plugin's, as SGLang names them.
    """

    def __init__(
        self,
        model: Path,
        device: str,
        log: Path,
        options: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
        loaders: Sequence[str] = (),
    ) -> None:
        super().__init__(_free_port(), model)
        common = "--load-format dummy --skip-tokenizer-init --sampling-backend pytorch --grammar-backend none"
        words = f"{common} --skip-server-warmup --log-level warning {_CPU if device == 'cpu' else _CUDA}".split()
        words += options
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(self.port)]
        hand_down(new_token())
        env = dict(os.environ, **({"SGLANG_USE_CPU_ENGINE": "1"} if device == "cpu" else {}), **variables)
        env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "0")
        with open(log, "wb") as output:
            command += [*words, "--custom-weight-loader", LOADER, *loaders]
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
        self._log = log
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            try:
                self.ask("GET", "/get_model_info")
                return
            except (OSError, RuntimeError):
                time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"SGLang did not start:\n{self._log.read_text(errors='replace')[-4000:]}")

    def schedulers(self) -> list[psutil.Process]:
        """The processes that hold the model, one per rank.

        Raises:
            RuntimeError: none is there.
        """
        below = psutil.Process(self._process.pid).children(recursive=True)
        # SGLang gives them this title
        found = [process for process in below if "sglang::scheduler" in " ".join(process.cmdline())]
        if not found:
            raise RuntimeError(f"no scheduler among {[process.cmdline() for process in below]}")
        return found

    def stop(self) -> None:
        """Ends the server and waits for it."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _free_port() -> int:
    """A port that is free now, low enough for SGLang, which also takes the one 10000 above."""
    while True:
        with socket.socket() as probe:
            port = random.randrange(20000, 30000)
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
