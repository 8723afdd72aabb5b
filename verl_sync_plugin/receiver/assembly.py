"""Puts tensors together from the pieces a bucket holds."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from verl_sync_plugin.bucket import Entry

# SGLang's DeepSeek loaders fuse these pairs inside one load_weights call; a pair torn over two calls leaves the fused
# weight stale without a word (first of a pair waits for the second). Suffixes of the HF name.
FUSED_PAIRS = (
    ("q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
    ("q_a_proj.weight_scale_inv", "kv_a_proj_with_mqa.weight_scale_inv"),
)


class Assembler:
    """Turns the entries of successive buckets into whole tensors.

    Peak memory beyond the staging slots: one tensor (its pieces joined) at a time, plus every tensor that is split
    over buckets and not yet complete, plus one half of a fused pair.
    """

    def __init__(self, names: frozenset[str] | None = None) -> None:
        """``names``: all tensors of the sync; half of a fused pair waits only for a partner among them."""
        self._names = names
        self._partial: dict[str, torch.Tensor] = {}
        self._arrived: dict[str, int] = {}
        self._waiting: dict[str, tuple[str, torch.Tensor]] = {}

    def tensors(self, memory: torch.Tensor, entries: tuple[Entry, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are complete with this bucket; they may alias ``memory``.

        Args:
            memory: the slot, uint8.
            entries: what the slot holds.
        """
        for entry in entries:
            flat = self._join(memory, entry)
            if flat is None:
                continue
            typed = flat.view(getattr(torch, entry.dtype))
            if entry.strides is None:
                tensor = typed.view(entry.shape)
            else:
                tensor = typed.as_strided(entry.shape, entry.strides)
            yield from self._release(entry.name, tensor)

    def _join(self, memory: torch.Tensor, entry: Entry) -> torch.Tensor | None:
        parts = [memory.narrow(0, piece.offset, piece.nbytes) for piece in entry.pieces]
        here = sum(piece.nbytes for piece in entry.pieces)
        if here == entry.nbytes:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        partial = self._partial.get(entry.name)
        if partial is None:
            partial = self._partial[entry.name] = torch.empty(entry.nbytes, dtype=torch.uint8, device=memory.device)
            self._arrived[entry.name] = 0
        for piece, part in zip(entry.pieces, parts, strict=True):
            partial.narrow(0, piece.target, piece.nbytes).copy_(part)
        self._arrived[entry.name] += here
        if self._arrived[entry.name] < entry.nbytes:
            return None
        del self._arrived[entry.name]
        return self._partial.pop(entry.name)

    def _release(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for first, second in FUSED_PAIRS:
            for mine, other in ((first, second), (second, first)):
                if name.endswith("." + mine):
                    partner = name[: -len(mine)] + other
                    if self._names is not None and partner not in self._names:
                        break  # without q_lora_rank there is nothing to fuse with
                    if partner in self._waiting:
                        yield self._waiting.pop(partner)
                        yield name, tensor
                    else:
                        # A copy: the slot is reused before the partner arrives
                        self._waiting[name] = (name, tensor.clone())
                    return
        yield name, tensor

    def finish(self) -> None:
        """Checks that nothing is left over.

        Raises:
            ValueError: a tensor or a fused pair is incomplete.
        """
        if self._partial or self._waiting:
            left = sorted([*self._partial, *self._waiting])
            raise ValueError(f"the sync ended with incomplete tensors: {', '.join(left[:10])}")
