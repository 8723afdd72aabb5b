"""What travels of a base of a PEFT model, by itself or apart from the rest."""

from __future__ import annotations

from dataclasses import replace

from verl_sync_plugin.lora.names import is_adapter
from verl_sync_plugin.lora.weights import LoRAWeight
from verl_sync_plugin.source.base import Member, Shard
from verl_sync_plugin.source.slicing import Part, part_of


def without_adapters(shard: Shard) -> Part:
    """What is left of a base; the base itself if there are no adapters in it."""
    views = tuple(view for view in shard.base.views if not is_adapter(view.name))
    if len(views) == len(shard.base.views):
        return Part(shard.base, shard.members)
    members = tuple(member for member in shard.members if not is_adapter(member.name))
    return Part(replace(shard.base, views=views), members)


def untied(whole: Part, rank: int, weights: dict[str, LoRAWeight]) -> list[Part]:
    """Tied parameters of which only some are adapted, or each by its own adapter, travel apart: merged they differ."""
    apart: list[Member] = []
    owners: dict[int, Member] = {}
    for member in whole.members:
        owner = owners.setdefault(member.start, member)
        if weights.get(member.name) is not weights.get(owner.name):
            apart.append(member)
    if not apart:
        return [whole]
    names = {member.name for member in apart}
    rest = tuple(view for view in whole.base.views if view.name not in names)
    kept = tuple(member for member in whole.members if member.name not in names)
    parts = [Part(replace(whole.base, views=rest), kept)]
    for member in apart:
        view = next(view for view in whole.base.views if view.name == member.name)
        key = f"{whole.base.key} ({member.name})"
        parts.append(part_of(whole.base, rank, key, view.start, view.span, (view,), (replace(member, start=0),)))
    return parts
