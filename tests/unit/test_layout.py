# SPDX-License-Identifier: Apache-2.0
"""Who holds what: the ranks agree or all say the same, and the senders' load is even."""

from __future__ import annotations

import pytest

from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import View
from verl_sync_plugin.trainers.joint import Part, RankLayout, choose_owners, match, replicas


def layout(*parts: Part, groups: tuple[tuple[int, ...], ...]) -> RankLayout:
    return RankLayout(parts, groups)


def part(name: str, index: int, parts: int = 2, numel: int = 32) -> Part:
    view = View(name, (numel * parts,), 0, numel * parts, None, (Run(0, index * numel, numel),))
    text = f"bfloat16 ({numel},)" + (f", part {index + 1} of {parts}" if parts > 1 else "")
    return Part(name, (index,), (numel,), "bfloat16", (view,), (numel, parts), text)


def whole(name: str, numel: int = 8) -> Part:
    return part(name, 0, 1, numel)


def tensor_parallel() -> list[RankLayout]:
    """Two ranks with a split weight and a norm that both hold."""
    return [layout(part("w", rank), whole("norm"), groups=((0, 1), (rank,))) for rank in range(2)]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([((0,),), ((1,),)], [(0,), (1,)]),
        ([((0, 1),), ((0, 1),), ((2, 3),), ((2, 3),)], [(0, 1), (2, 3)]),
        ([((0, 2),), ((1, 3),), ((0, 2),), ((1, 3),)], [(0, 2), (1, 3)]),
        # Tensor parallel pairs, joined by expert groups across them
        ([((0, 1), (0, 2)), ((0, 1), (1, 3)), ((2, 3), (0, 2)), ((2, 3), (1, 3))], [(0, 1, 2, 3)]),
    ],
)
def test_replicas(groups: list[tuple[tuple[int, ...], ...]], expected: list[tuple[int, ...]]) -> None:
    assert replicas([layout(groups=of_rank) for of_rank in groups]) == expected


def test_replica_without_a_parameter_is_named() -> None:
    ranks = [layout(whole("a"), whole("b"), groups=((rank,),)) for rank in range(2)]
    ranks[1] = layout(whole("a"), groups=((1,),))
    with pytest.raises(ValueError, match=r"rank 1 holds no copy of parameter 'b' .*, which rank 0 hold"):
        match(ranks)


def test_twice_on_one_rank() -> None:
    with pytest.raises(ValueError, match="'a' is there twice on rank 0"):
        match([layout(whole("a"), whole("a"), groups=((0,),))])


def test_owners_share_the_load() -> None:
    """One rank alone holds a large weight: the others send what all of them hold."""
    everywhere = [whole(f"w{index}") for index in range(6)]
    ranks = [layout(*everywhere, groups=((0, 1, 2),)) for _ in range(3)]
    ranks[1] = layout(*everywhere, whole("large", 32), groups=((0, 1, 2),))
    (units,) = match(ranks).values()
    owners = choose_owners(units, (0, 1, 2))
    assert units[-1].parts[0].name == "large" and owners[-1] == (1,)
    assert sorted(owners[:-1]) == [(0,), (0,), (0,), (2,), (2,), (2,)]


def test_each_replica_has_senders_of_its_own() -> None:
    ranks = [layout(whole("a"), groups=((rank % 2, rank % 2 + 2),)) for rank in range(4)]
    found = match(ranks)
    assert {members: choose_owners(units, members) for members, units in found.items()} == {
        (0, 2): [(0,)],
        (1, 3): [(1,)],
    }
