# SPDX-License-Identifier: Apache-2.0
"""Flips one bit of a real engine's sync on a GPU: in a staged bucket, in the trainer's memory, or in the engine's
parameter. On CPUs: ``test_engine_models.py``, ``test_one_process.py``, ``test_separate_syncs.py``."""

import base64
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from contract.sources import reads_unseen
from several_hosts_on_gpu import digest, play
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.rollouts.sglang.request import dumps

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DEVICE = "cuda"
SPOIL = "bare_engine.loaders.spoil"
PARAMETER, TENSOR = "model.layers.1.mlp.gate_up_proj.weight", "model.layers.1.mlp.gate_proj.weight"
BUCKET_MB = 4
READ, HELD = "changed on the way to the engine", "do not hold what was sent of"
STAGED, DIRECT = "plugin-staged", "plugin"
# Variant, where the bit flips, whether bytes are hashed, custom.sync.verify: what finds it, if anything does
ON_THE_WAY = {(True, "never"): READ, (False, "always"): HELD, (False, "never"): ""}
IN_ENGINE = {(True, "always"): HELD, (True, "never"): ""}
FOUND_BY = {
    (variant, where, *how): by
    for variant, source in ((STAGED, "staging"), (DIRECT, "trainer"))
    for where, found in ((source, ON_THE_WAY), ("engine", IN_ENGINE))
    for how, by in found.items()
}


class Flips:
    """In syncs of one way from the trainer's tensors, which hold one of two sets of weights, to the server."""

    def __init__(self, bench: Any, variant: str, digests: dict[int, str]) -> None:
        from benchmarks.transfer import make_way

        self._bench, self._digests = bench, digests
        self._way = make_way(variant, bench.server, bench.named, BUCKET_MB, DEVICE)
        self._manager, self._direct, self._set = self._way._manager, variant == DIRECT, 0
        for _ in range(4):  # an even number: the next way begins with the same set
            self._exact()

    def _exact(self) -> None:
        """A verified sync of the other set, after which the engine holds what any sync of that set has brought."""
        self._bench.other_weights()
        self._set = 1 - self._set
        self._manager.cadence._verify = "always"
        self._way.sync()
        now = digest(self._bench.server)
        assert self._digests.setdefault(self._set, now) == now, "the engine holds something else than before"
        assert len(set(self._digests.values())) == len(self._digests), "the sets cannot be told apart"

    def found(self, where: str, hashed: bool, verify: str) -> str:
        """The error of a sync in which a bit flips; the next ones are exact."""
        flip = {"staging": self._in_staging, "trainer": self._in_trainer, "engine": self._in_engine}[where]
        unseen = nullcontext() if hashed else reads_unseen()
        self._manager.cadence._verify = verify
        text = ""
        with unseen, flip():
            try:
                self._way.sync()
            except SyncError as error:
                text = str(error)
        assert (self._manager.report.delivery == "in place") is self._direct
        for _ in range(2):
            self._exact()
        return text

    @contextmanager
    def _in_staging(self) -> Iterator[None]:
        """Flips a bit of the second bucket, between its packing and the engine's load."""
        sender, flipped = self._manager.sender, []
        honest = sender.load

        def load(index: int, slot: int) -> None:
            if index == 1:
                flipped.append(slot)
                sender._slot(slot)[7] ^= 2
                torch.cuda.synchronize()
            honest(index, slot)

        with mock.patch.object(sender, "load", load):
            yield
        assert flipped

    @contextmanager
    def _in_trainer(self) -> Iterator[None]:
        """After the read that hashes; flipped back in the end."""
        sender, flipped = self._manager.sender, []
        honest = sender.hash_parameters

        def read(*given: Any) -> None:
            honest(*given)
            flipped.append(self._flip_trainer())

        with mock.patch.object(sender, "hash_parameters", read):
            yield
        assert len(flipped) == 1
        self._flip_trainer()

    def _flip_trainer(self) -> None:
        torch.cuda.synchronize()
        dict(self._bench.named)[TENSOR].view(torch.uint8).view(-1)[71] ^= 64
        torch.cuda.synchronize()

    def _in_engine(self) -> AbstractContextManager[None]:
        """After the copies of the next sync, by a loader in the engine's own process."""
        packed = base64.b64encode(dumps([(PARAMETER, torch.empty(0))])).decode()
        body = {"serialized_named_tensors": [packed], "load_format": SPOIL, "flush_cache": False}
        self._bench.server.ask("POST", "/update_weights_from_tensor", body)
        return nullcontext()

    def close(self) -> None:
        self._way.close()


def trainer(rank: int, folder: Path) -> dict[tuple[str, str, bool, str], str]:
    """Returns what was found in every case of ``FOUND_BY``."""
    from benchmarks import transfer

    paths = {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))}
    with transfer.one_rank(folder):
        config = transfer.write_config("small", folder / "small")
        named = transfer.random_weights("small", DEVICE, "bfloat16", folder)
        server = transfer.Server(config, DEVICE, folder / "server.log", variables=paths, loaders=(SPOIL,))
        bench = transfer.Rig(server, named, DEVICE, sum(tensor.nbytes for _, tensor in named))
        digests: dict[int, str] = {}
        found = {}
        try:
            for variant in (STAGED, DIRECT):
                flips = Flips(bench, variant, digests)
                for case in FOUND_BY:
                    if case[0] == variant:
                        found[case] = flips.found(*case[1:])
                flips.close()
        finally:
            server.stop()
    return found


def test_a_flipped_bit_is_found_on_a_gpu(tmp_path: Path) -> None:
    (found,) = play(1, trainer, tmp_path, seconds=280.0)
    assert isinstance(found, dict), found
    for case, text in FOUND_BY.items():
        assert (text in found[case]) if text else not found[case], (case, found[case])
        layer = case[1] == "staging" or "model.layers.1.mlp." in found[case]
        assert layer or not text, (case, found[case])
