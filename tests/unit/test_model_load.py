# SPDX-License-Identifier: Apache-2.0
"""Loads of all kinds, however tensors are cut, staged and in place: exact, with the hashes of what was packed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from receiving import BF16, WORLD, Sender, Weights, memory_for

from verl_sync_plugin.copies.copier import Copier
from verl_sync_plugin.transport.memory import NotInPlaceError, Regions

FP32 = torch.float32
ROWS, COLUMNS = 24, 40
Load = Callable[[torch.Tensor, torch.Tensor], object]
LOADS: dict[str, tuple[tuple[int, ...], torch.dtype, Load]] = {
    "apart": ((2 * ROWS, COLUMNS), BF16, lambda p, t: p[::2].copy_(t)),
    "columns": ((ROWS, COLUMNS // 2), BF16, lambda p, t: p.copy_(t[:, : COLUMNS // 2])),
    "computed": ((ROWS, COLUMNS), BF16, lambda p, t: p.copy_(t + 1)),
    "interleaved": ((ROWS, 2 * COLUMNS), BF16, lambda p, t: (p.fill_(5), p[:, ::2].copy_(t))),
    "padded": ((ROWS + 8, COLUMNS), BF16, lambda p, t: (p[:ROWS].copy_(t), p[ROWS:].fill_(-0.0))),
    "rows": ((ROWS // 2, COLUMNS), BF16, lambda p, t: p.copy_(t[ROWS // 2 :])),
    "short": ((ROWS, 3), BF16, lambda p, t: p.copy_(t[:, :3])),
    "transposed": ((COLUMNS, ROWS), BF16, lambda p, t: p.copy_(t.t())),
    "turned": ((ROWS, COLUMNS // 4, 4), BF16, lambda p, t: p.copy_(t.view(ROWS, 4, COLUMNS // 4).transpose(1, 2))),
    "whole": ((ROWS, COLUMNS), BF16, lambda p, t: p.copy_(t)),
    "wide": ((ROWS, COLUMNS), FP32, lambda p, t: p.copy_(t)),
}
PLAIN = ("apart", "columns", "padded", "rows", "short", "whole")  # what may be read in place
IN_PART = {"columns", "rows", "short"}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, (shape, dtype, _) in LOADS.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            LOADS[name][2](getattr(self, name).data, tensor)


def sender_of(loads: tuple[str, ...], folder: Path, bucket_bytes: int = 1 << 20, seed: int = 0) -> Sender:
    """Ties two of the tensors where the seed is odd."""
    tied = seed % 2
    names = [(name,) for name in loads if not tied or name not in ("rows", "whole")] + [("whole", "rows")] * tied
    return Sender(names, (ROWS, COLUMNS), bucket_bytes, seed, folder)


@torch.no_grad()
@pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in place"])
@pytest.mark.parametrize(
    ("device", "seed", "bucket_bytes"),
    [
        *(("by_plain", seed, size) for seed, size in enumerate((1 << 20, 600, 3000, 3000, 600, 1 << 20))),
        *(("by_kernel", seed, size) for seed, size in enumerate((1 << 20, 3000))),  # the interpreter takes its time
    ],
    indirect=["device"],
)
def test_syncs_do_as_the_models_load(seed: int, bucket_bytes: int, in_place: bool, device: str, tmp_path: Path) -> None:
    loads = PLAIN if in_place else tuple(LOADS)
    sender = sender_of(loads, tmp_path, bucket_bytes, seed)
    model, reference = Model(), Model()
    load = sender.receiver(model)
    for number in range(3):
        for parameter in (each for kept in (model, reference) for each in kept.parameters()):
            parameter.view(torch.uint8).fill_(0xA5)  # what memory holds that was released
        values = sender.train(number)
        if in_place:
            sender.in_place(load, seed % WORLD)
        else:
            sender.staged(load)
        reference.load_weights(values.items())
        for name, parameter in reference.named_parameters():
            assert torch.equal(getattr(model, name).view(torch.uint8), parameter.view(torch.uint8)), name
        assert sender.compared(load) >= set(loads) - IN_PART - {"computed", "whole"}
    left = [sorted(loads)[left.tensor] for left in load.map.not_copied]
    assert left == ([] if in_place else ["computed"]) and ("itself" in load.obstacle) is not in_place


def test_says_where_parameters_lie_or_why_they_cannot_be_read_there(tmp_path: Path) -> None:
    sender = Sender([("whole",)], (ROWS, COLUMNS), 700, 1, tmp_path)
    (mine,), run = sender.shards[0], sender.shards[0][0].local()
    parameters = sender.parameters[0]
    first = parameters.locate([mine])
    assert parameters.locate([mine]) is first, "said again only when something has moved"
    moved = memory_for(run.numel(), run.dtype, tmp_path / "moved")
    assert parameters.locate([replace(mine, run=moved)]).key != first.key
    for why, spoiled in {
        "private to the trainer's process": replace(mine, run=run.clone()),
        "is merged with its adapter": replace(mine, merge=lambda part, begin: part),
        "is torch.float64 and travels as bfloat16": replace(mine, run=run.double(), local=run.double),
    }.items():
        with pytest.raises(NotInPlaceError, match=f"'whole'.*{why}"):
            parameters.locate([spoiled])


def test_bytes_that_nobody_named_and_memory_that_is_gone_are_an_error(tmp_path: Path) -> None:
    sender = sender_of(PLAIN, tmp_path)
    locations = [mine.locate(shards) for mine, shards in zip(sender.parameters, sender.shards, strict=True)]
    first, *rest = locations
    for broken in ([replace(first, runs=(b"",) * len(first.runs)), *rest], [rest[0], first, *rest[1:]]):
        with pytest.raises(ValueError, match="trainer rank"):
            sender.in_place(sender.receiver(Model()), 0, broken)
    with pytest.raises(FileNotFoundError, match="/gone"):
        Regions().map([replace(locations[0].regions[0], key="gone", handle=b"/gone")])


@pytest.mark.parametrize("place", range(WORLD))
def test_rows_are_read_in_turn_from_the_own_one_on(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, homes, honest = sender_of(PLAIN, tmp_path), list[Any](), Copier.prepare
    monkeypatch.setattr(Copier, "prepare", lambda copier, blocks, *of: homes.extend(of) or honest(copier, blocks))
    sender.in_place(sender.receiver(Model()), place)
    locations = [mine.locate(shards) for mine, shards in zip(sender.parameters, sender.shards, strict=True)]
    # its own comes last
    expected = [*((rank - place) % WORLD for rank, each in enumerate(locations) for _ in each.regions), 0]
    assert homes == [expected] * 2 and set(expected) == set(range(WORLD))


class Adding(torch.nn.Module):
    """Changes what it is given, as SGLang's Gemma adds 1 to norms where they arrive."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.held = torch.nn.ParameterDict({name.replace(".", "/"): torch.zeros(8, 4, dtype=BF16) for name in names})
        self.calls: list[set[str]] = []

    def load_weights(self, weights: Weights) -> None:
        self.calls.append(set())
        for name, tensor in weights:
            self.calls[-1].add(name)
            self.held[name.replace(".", "/")].data.copy_(tensor.add_(1))


FIRST, SECOND = "q_a_proj.weight", "kv_a_proj_with_mqa.weight"


@pytest.mark.parametrize(("seed", "bucket_bytes"), [(0, 16), (1, 16), (2, 64)])
@pytest.mark.parametrize(("names", "together"), [
    ([f"m.3.{FIRST}", "m.between", f"m.3.{SECOND}", "m.after"], [{0, 2}, {1}, {3}]),
    ([f"m.3.{SECOND}_scale_inv", "m.between", f"m.3.{FIRST}_scale_inv", "m.after"], [{0, 2}, {1}, {3}]),
    ([f"l.0.{FIRST}", f"l.1.{FIRST}", f"l.1.{SECOND}", f"l.0.{SECOND}"], [{0, 3}, {1, 2}]),
    ([f"l.0.{FIRST}", "m.after"], [{0}, {1}]),  # it does not wait for a half that is not sent
])  # fmt: skip
def test_torn_tensors_arrive_whole(names: list[str], together: list[set[int]], seed: int, bucket_bytes: int) -> None:
    """Covers pairs in one load, and two engine ranks of which each changes what it is given."""
    sender = Sender([(name,) for name in names], (8, 4), bucket_bytes, seed)
    models = [Adding(names), Adding(names)]
    loads = [sender.receiver(model) for model in models]
    for number in range(2):
        for model in models:
            model.calls.clear()
        values = sender.train(number)
        sender.staged(*loads)
        for model in models:
            assert all(torch.equal(model.held[name.replace(".", "/")], values[name] + 1) for name in names)
    for some in together:
        assert all(any({names[each] for each in some} <= call for call in model.calls) for model in models)


def test_a_tensor_that_does_not_come_whole_is_named() -> None:
    sender = Sender([("torn",)], (8, 4), 16)
    load = sender.receiver(Adding(["torn"]))
    load.begin()
    load.load(0, [torch.zeros(sender.plan.slot_bytes, dtype=torch.uint8) for _ in range(WORLD)])
    with pytest.raises(ValueError, match="incomplete tensors: torn"):
        load.finish()
