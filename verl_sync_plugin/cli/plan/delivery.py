# SPDX-License-Identifier: Apache-2.0
"""Which way the bytes would take, and what of that only the first sync knows."""

from __future__ import annotations

from dataclasses import dataclass

from verl_sync_plugin.cli.plan.model import OWN_PATH, REPLAYED, Model
from verl_sync_plugin.layout.holders import Holders, most_held

DELIVERIES = ("auto", "direct", "sharded", "exchanged", "gathered", "broadcast")


@dataclass(frozen=True)
class Ways:
    """The way of the first sync, of later ones, and why.

    Attributes:
        first, later: names of deliveries.
        why: of the later one; empty where it is the fastest.
        loading: how the engine loads, as far as the config tells.
        certain: ``loading`` stands in the table of families that tests make.
        held: the most segments of a bucket that one rank stages where segments stay with their ranks.
    """

    first: str
    later: str
    why: str
    loading: str
    certain: bool
    held: int = 1

    @property
    def sharded(self) -> bool:
        """Whether segments stay with their ranks (``layout.tensors.Plan``)."""
        return self.first in ("sharded", "exchanged")


def choose(asked: str, model: Model, group: int, per_node: int, offload: bool) -> Ways:
    """The deliveries that a run would take.

    Args:
        asked: ``custom.sync.delivery``.
        group: trainer ranks that share out the model.
        per_node: GPUs of one node.
        offload: the trainer's parameters are in host memory.

    Raises:
        ValueError: what is asked for is not possible; names option and remedy.
    """
    loading, certain = _loading(model)
    several = group > per_node
    if asked == "broadcast":
        return Ways("broadcast", "broadcast", "asked for", loading, certain)
    if several and asked in ("sharded", "direct"):
        raise ValueError(
            f"--delivery {asked}: the {group} ranks that share out the model are on several nodes of {per_node} GPUs; "
            "use --delivery exchanged, or auto"
        )
    if not several and asked == "exchanged":
        raise ValueError(f"--delivery {asked}: the {group} ranks that share out the model are on one node; use auto")
    if asked == "gathered":
        return Ways("gathered", "gathered", "asked for", loading, certain)
    if several:
        why = f"{group} ranks share out the model, on several nodes"
        return Ways("exchanged", "exchanged", why, loading, certain, _held(group, per_node))
    obstacle = ""
    if offload:
        obstacle = "offloaded parameters are staged"
    elif model.model_type in OWN_PATH:
        obstacle = "the engine's own load needs whole tensors"
    if asked == "direct" and obstacle:
        raise ValueError(f"--delivery direct: {obstacle}; use --delivery auto")
    if asked == "sharded" or obstacle:
        return Ways("sharded", "sharded", obstacle or "asked for", loading, certain)
    return Ways("sharded", "direct", "", loading, certain)


def _held(group: int, per_node: int) -> int:
    ranks = tuple(range(group))
    return most_held([Holders(ranks, ranks, tuple(str(rank // per_node) for rank in ranks))])


def _loading(model: Model) -> tuple[str, bool]:
    if model.model_type in OWN_PATH:
        return f"through the engine model's load_weights in every sync: {OWN_PATH[model.model_type]}", True
    if model.model_type in REPLAYED:
        return "by the copy plan from the second sync on: all tensors", True
    return "not known for this family before the first sync, which says so and checks every byte", False
