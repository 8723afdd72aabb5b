# SPDX-License-Identifier: Apache-2.0
"""What travels of a base of a PEFT model, by itself or apart from the rest."""

from __future__ import annotations

import math
from dataclasses import replace

from verl_sync_plugin.layout.shard import Member, Shard
from verl_sync_plugin.layout.tensors import View
from verl_sync_plugin.lora.names import is_adapter
from verl_sync_plugin.lora.weights import LoRAWeight
from verl_sync_plugin.trainers.slicing import Part, part_of


def without_adapters(shard: Shard) -> Part:
    """What is left of a base; the base itself if there are no adapters in it."""
    views = tuple(view for view in shard.base.views if not is_adapter(view.name))
    if len(views) == len(shard.base.views):
        return Part(shard.base, shard.members)
    members = tuple(member for member in shard.members if not is_adapter(member.name))
    return Part(replace(shard.base, views=views), members)


def untied(whole: Part, rank: int, weights: dict[str, LoRAWeight]) -> list[Part]:
    """Splits tied parameters of which only some are adapted, or each by its own adapter: merged they differ."""
    apart: list[Member] = []
    owners: dict[int, Member] = {}
    for member in whole.members:
        owner = owners.setdefault(member.start, member)
        if weights.get(member.name) is not weights.get(owner.name):
            apart.append(member)
    if not apart:
        return [whole]
    names = {member.name for member in apart}
    moved = {member.name: _views_of(member, whole) for member in apart}
    gone = {view.name for views in moved.values() for view in views}
    rest = tuple(view for view in whole.base.views if view.name not in gone)
    kept = tuple(member for member in whole.members if member.name not in names)
    parts = [Part(replace(whole.base, views=rest), kept)]
    for member in apart:
        key = f"{whole.base.key} ({member.name})"
        start, numel = member.start, math.prod(member.shape)
        alone = (replace(member, start=0),)
        parts.append(part_of(whole.base, rank, key, start, numel, moved[member.name], alone))
    return parts


def _views_of(member: Member, whole: Part) -> tuple[View, ...]:
    """What a parameter travels as; a checkpoint's name for it may be another than the trainer's.

    Tied parameters have equally many views over the same elements, in the order of the members.
    """
    tied = [each for each in whole.members if each.start == member.start]
    end = member.start + math.prod(member.shape)
    views = [view for view in whole.base.views if member.start <= view.start < end]
    each, place = len(views) // len(tied), tied.index(member)
    return tuple(views[place * each : (place + 1) * each])
