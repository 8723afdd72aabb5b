# SPDX-License-Identifier: Apache-2.0
"""Every kind of fault in every place, at every stage and in every kind of sync, on real parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faults.cells import Cell, matrix
from faults.driver import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMOKE = (
    Cell("trainer", "pack", "oom", "second"),
    Cell("engine", "load", "error", "direct"),
    Cell("server", "commit", "error", "first"),
    Cell("engine", "connect", "error", "second"),
    Cell("leader", "hand over", "slow", "direct"),
    Cell("engine", "verify", "error", "first"),
    Cell("leader", "compare", "error", "second"),
    Cell("engine", "finish", "stop", "direct"),
    Cell("engine", "commit", "stop", "second"),
    Cell("trainer", "commit", "kill", "direct"),
)


class Worlds:
    """The world that the last cell left whole, or that went on from its checkpoint."""

    def __init__(self, model: str, folder: Path) -> None:
        self._model, self._folder, self._made = model, folder, 0
        self._world: World | None = None

    @property
    def world(self) -> World:
        """The one there is, or the first."""
        if self._world is None:
            self._world = World(self._model, self._next_folder())
        return self._world

    def _next_folder(self) -> Path:
        self._made += 1
        return self._folder / str(self._made)

    def play(self, cell: Cell) -> None:
        """Where the run must be restarted, it is, and its first sync is exact."""
        world = self.world
        try:
            world.run(cell)
            if not world.whole:
                self.close()
                self._world = world.restarted(self._next_folder())
                self._world.first_sync()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None


@pytest.fixture(scope="module")
def worlds(tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    made = Worlds(tiny_model("qwen2"), tmp_path_factory.mktemp("worlds"))
    yield made
    made.close()


def test_answers_tell_which_weights_they_are_of(worlds: Worlds) -> None:
    worlds.world.two_versions()


@pytest.mark.parametrize("cell", SMOKE, ids=str)
def test_some_faults_end_as_promised(cell: Cell, worlds: Worlds) -> None:
    worlds.play(cell)


@pytest.mark.faults
@pytest.mark.parametrize("cell", matrix(), ids=str)
def test_every_fault_ends_as_promised(cell: Cell, worlds: Worlds) -> None:
    worlds.play(cell)
