# SPDX-License-Identifier: Apache-2.0
"""Whole syncs as an engine rank sees them: through mappings of its own of the trainer ranks' slots."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from verl_sync_plugin.copies.copier import BucketMemory
from verl_sync_plugin.engine.load import Assembler
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Plan, Shard
from verl_sync_plugin.sync.sender import SLOTS, BucketSender
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.memory import Regions

CPU = torch.device("cpu")
TINY, LARGE = 6_001, 64 << 20  # bytes of a bucket; TINY is no multiple of anything
WAYS = ((TINY, False), (LARGE, False), (TINY, True))  # sizes, and whether all ranks share out every bucket
State = dict[str, torch.Tensor]


class Reader:
    """Syncs a source as the manager does, and reads it as the next engine rank does; all calls are collective."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.plan: Plan | None = None  # of the last sync
        self.agreement = Agreement(20.0)

    def shards(self, bucket_bytes: int, sharded: bool = False) -> list[Shard]:
        """Plans a sync, of whose tensors this rank has these parts."""
        self.source = self.source.agree_on_layout(self.agreement)
        shards: list[Shard] = self.agreement.step("reading the shards", self.source.shards)
        self.plan = plan_buckets(tuple(shard.base for shard in shards), bucket_bytes, sharded)
        assert self.plan.slot_bytes <= bucket_bytes
        self.agreement.same_on_all("the plan", self.plan.digest)
        return shards

    def sync(self, bucket_bytes: int = TINY, sharded: bool = False) -> State:
        """Every tensor that arrives, once."""
        sender = BucketSender(CPU, 30.0)
        try:
            shards, plan, source = self.shards(bucket_bytes, sharded), self.plan, self.source
            group, rank = source.group, source.rank
            mine, regions = sender.reserve(plan), Regions()
            sender.begin(plan, rank)
            everywhere = self.agreement.gather("where the slots are", mine)
            stagings = [everywhere[each] for each in dist.get_process_group_ranks(group)] if plan.sharded else [mine]
            regions.map(each.region for each in stagings)
            meet = partial(dist.barrier, group) if plan.sharded else lambda: None
            assembler, got = Assembler(frozenset(plan.names)), State()
            for index, bucket in enumerate(plan.buckets):
                slot = index % SLOTS
                if source.prepares:
                    later = [later.bases for later in plan.buckets[index + 1 :]]
                    self.agreement.run("packing", source.prepare(bucket.bases, later))
                    self.agreement.settle("packing")
                meet()  # everyone has read what was there, and it is packed over rubbish
                sender._slot(slot).fill_(0xEE)
                sender.pack(index, slot, shards)
                if not plan.sharded and bucket.world > 1:
                    start = partial(dist.broadcast, group=group, async_op=True)
                    sender.broadcast(bucket, slot, dist.get_process_group_ranks(group), start)
                    sender.drain(slot)
                meet()
                sources = stagings if plan.sharded and bucket.world > 1 else [mine]
                slots = [regions.slot(each, slot) for each in sources]
                for name, tensor in assembler.tensors(BucketMemory(slots, bucket.stride, bucket.world), bucket.entries):
                    assert name not in got, f"{name} came twice"
                    got[name] = tensor.clone()
            assembler.finish()
            meet()
            return got
        finally:
            sender.close()
            self.source.release()


def sync(source: Any, bucket_bytes: int = TINY, sharded: bool = False) -> State:
    return Reader(source).sync(bucket_bytes, sharded)


def check_syncs(
    source: Any,
    expected: Callable[[], State],
    change: Callable[[], object],
    modules: Iterable[torch.nn.Module] = (),
    same: Callable[[State, State], None] | None = None,
    rounds: int = 2,
) -> Reader:
    """Checks ``rounds`` syncs in every way, with a ``change`` of the trainer after each. What comes is ``expected``, as
    ``same`` compares it. Plans stay alike, and no parameter of ``modules`` is written."""
    reader, digests = source if isinstance(source, Reader) else Reader(source), list[str]()
    for bucket_bytes, sharded in WAYS * rounds:
        wanted = expected()
        before = [(each, each._version, _local(each).clone()) for module in modules for each in module.parameters()]
        (same or check_same)(reader.sync(bucket_bytes, sharded), wanted)
        assert all(each._version == version and torch.equal(_local(each), held) for each, version, held in before)
        assert reader.plan is not None
        digests.append(reader.plan.digest)
        change()
    assert digests == digests[: len(WAYS)] * rounds, "the plan changed though the layout did not"
    return reader


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return getattr(parameter, "_local_tensor", parameter).detach()


def check_same(got: State, expected: State) -> None:
    assert sorted(got) == sorted(expected)
    odd = {name: (got[name].dtype, t.dtype) for name, t in expected.items() if got[name].dtype != t.dtype}
    assert not odd, odd
    different = [n for n, t in expected.items() if got[n].shape != t.shape or not torch.equal(got[n], t)]
    assert not different, different


Blocks = Mapping[str, tuple[int, int]]


def quantized(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in fp8 and its scales, of blocks of so many rows and columns."""
    (rows, columns), (high, wide) = weight.shape, block
    whole = torch.nn.functional.pad(weight.float(), (0, -columns % wide, 0, -rows % high))
    parts = whole.view(whole.shape[0] // high, high, whole.shape[1] // wide, wide)
    scales = parts.abs().amax((1, 3)).clamp(min=1e-10) / torch.tensor([448.0])
    values = (parts * (1.0 / scales)[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.view(whole.shape)[:rows, :columns].contiguous(), scales


def in_fp8(state: State, blocks: Blocks) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state, those with blocks in fp8; what travels in bf16 is cast to it first."""
    for name, tensor in state.items():
        if name in blocks:
            values, scales = quantized(tensor.to(torch.bfloat16), blocks[name])
            yield name, values
            yield f"{name}_scale_inv", scales
        else:
            yield name, tensor


def projections(state: State, block: tuple[int, int]) -> Blocks:
    """The weights that an engine keeps in fp8, experts among them."""
    return {name: block for name, tensor in state.items() if tensor.dim() == 2 and name.endswith("_proj.weight")}


def check_quantized(manager: Any, expected: State, blocks: Blocks, bucket_bytes: int, sharded: bool) -> Reader:
    """Syncs what a manager's trainer holds in fp8: it must be that of the whole tensors. Collective."""
    manager.trainer.policy.blocks.update(blocks)
    reader = Reader(manager.open_source())
    got = reader.sync(bucket_bytes, sharded)
    bits = {name: t.view(torch.uint8) if t.dtype.itemsize == 1 else t for name, t in got.items()}
    wanted = {n: t.view(torch.uint8) if t.dtype.itemsize == 1 else t for n, t in in_fp8(expected, blocks)}
    check_same(bits, wanted)
    return reader
