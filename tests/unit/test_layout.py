# SPDX-License-Identifier: Apache-2.0
"""Who holds what: the ranks agree or all say the same, and the senders' load is even."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verl_sync_plugin.trainers.megatron.layout import LocalParameter, RankLayout, choose_owners, match, replicas
from verl_sync_plugin.trainers.megatron.reading import NUMBER


def layout(*parameters: LocalParameter, groups: tuple[tuple[int, ...], ...]) -> RankLayout:
    return RankLayout(parameters, groups)


def part(name: str, index: int, parts: int = 2, shape: tuple[int, ...] = (4, 8)) -> LocalParameter:
    return LocalParameter(name, shape, "bfloat16", index, parts)


def whole(name: str, shape: tuple[int, ...] = (8,)) -> LocalParameter:
    return LocalParameter(name, shape, "bfloat16")


def tensor_parallel() -> list[RankLayout]:
    """Two ranks with a split weight and a norm that both hold."""
    return [layout(part("w", rank), whole("norm"), groups=((0, 1), (rank,))) for rank in range(2)]


def test_parts_are_found_and_replicas_of_a_parameter_counted() -> None:
    ((split, norm),) = match(tensor_parallel())
    assert (split.like.name, split.holders) == ("w", ((0,), (1,)))
    assert (norm.like.name, norm.holders) == ("norm", ((0, 1),))


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": (4, 9)}, "parameter 'w': rank 0: bfloat16 (4, 8), part 1 of 2 along dimension 0; rank 1: bfloat16 "),
        ({"dtype": "float32"}, "rank 1: float32 (4, 8)"),
        ({"parts": 4}, "rank 1: bfloat16 (4, 8), part 2 of 4"),
        ({"dim": 1}, "rank 1: bfloat16 (4, 8), part 2 of 2 along dimension 1"),
        ({"buffer": True}, "disagree on parameter 'w'"),
    ],
)
def test_disagreement_names_the_parameter_and_the_ranks(change: dict[str, object], said: str) -> None:
    ranks = tensor_parallel()
    odd = replace(ranks[1].parameters[0], **change)  # type: ignore[arg-type]
    ranks[1] = replace(ranks[1], parameters=(odd, *ranks[1].parameters[1:]))
    with pytest.raises(ValueError) as caught:
        match(ranks)
    assert "the ranks disagree on parameter 'w'" in str(caught.value) and said in str(caught.value)


def test_missing_part_names_who_lacks_it() -> None:
    ranks = tensor_parallel()
    ranks[1] = replace(ranks[1], parameters=ranks[1].parameters[1:])
    with pytest.raises(ValueError, match=r"ranks 0, 1 hold no part 2 of 2 of parameter 'w' .*, which rank 0 hold"):
        match(ranks)


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
    ranks[1] = layout(*everywhere, whole("large", (32,)), groups=((0, 1, 2),))
    (units,) = match(ranks)
    owners = choose_owners(units, (0, 1, 2), [unit.like.shape[0] * 2 for unit in units])
    assert [unit.like.name for unit in units][-1] == "large" and owners[-1] == (1,)
    assert sorted(owners[:-1]) == [(0,), (0,), (0,), (2,), (2,), (2,)]


def test_owners_are_places_in_the_replica() -> None:
    ranks = [layout(whole("a"), groups=((rank % 2, rank % 2 + 2),)) for rank in range(4)]
    even, odd = match(ranks)
    assert choose_owners(odd, (1, 3), [16]) == [(0,)] and odd[0].holders == ((1, 3),)
    assert choose_owners(even, (0, 2), [16]) == [(0,)]


def test_kinds_differ_by_names_and_not_by_numbers_of_layers_and_experts() -> None:
    """``linear_fc1`` and ``linear_fc2`` may have one shape, and are cut along other dimensions."""
    names = ["layers.3.mlp.experts.linear_fc1.weight12", "layers.10.mlp.linear_fc2.bias", "experts.7.up_proj.weight"]
    assert [NUMBER.sub("#", name) for name in names] == [
        "layers.#.mlp.experts.linear_fc1.weight#",
        "layers.#.mlp.linear_fc2.bias",
        "experts.#.up_proj.weight",
    ]
