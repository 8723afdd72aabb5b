# SPDX-License-Identifier: Apache-2.0
"""What an engine can be asked about its weights without any of the code that moves them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from sglang.srt.managers.io_struct import CheckWeightsReqInput, UpdateWeightsFromTensorReqInput

from verl_sync_plugin import compat
from verl_sync_plugin.rollouts.sglang import digests
from verl_sync_plugin.rollouts.sglang.request import pack_request


class Oracles:
    """In the process of SGLang's tokenizer manager.

    Attributes:
        tokenizer_manager: SGLang's.
    """

    tokenizer_manager: Any

    async def check_weights(self, action: str) -> dict[str, str]:
        """SGLang's own ``/weights_checker``: ``reset_tensors`` fills all parameters of all ranks with random numbers,
        ``checksum`` tells those of the first rank by parameter.

        Raises:
            RuntimeError: this SGLang cannot do that here (``checksum`` needs a GPU).
        """
        success, message, *rest = await self.tokenizer_manager.check_weights(CheckWeightsReqInput(action=action))
        if not success:
            raise RuntimeError(f"SGLang's weights_checker refused {action}: {message}")
        ranks = rest[0] if rest else None
        return dict(ranks[0]["checksums"]) if ranks else {}

    async def digests(self) -> list[dict[str, str]]:
        """Of each tensor-parallel rank the digests of its parameters; see ``digests.py``.

        Raises:
            RuntimeError: a rank wrote none; its log says why.
        """
        world = int(self.tokenizer_manager.server_args.tp_size)
        with tempfile.TemporaryDirectory(prefix="verl-sync-digests-") as folder:
            path = Path(folder) / "rank"
            obj = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[pack_request((str(path),))] * world,
                load_format=digests.LOADER,
                flush_cache=False,
            )
            async with compat.weight_update_session(self.tokenizer_manager):
                success, message = await self.tokenizer_manager.update_weights_from_tensor(obj, None)
            files = [path.with_name(f"rank.{rank}") for rank in range(world)]
            if not success or not all(file.exists() for file in files):
                raise RuntimeError(f"an engine rank told no digests of its parameters: {message}; see its log")
            return [json.loads(file.read_text(encoding="utf-8")) for file in files]
