# SPDX-License-Identifier: Apache-2.0
"""The process of a script's engine: ``python -m verl_sync_plugin.rollouts.sglang.script_server FD``."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import CheckWeightsReqInput, GenerateReqInput

from verl_sync_plugin import compat
from verl_sync_plugin.rollouts import process
from verl_sync_plugin.rollouts.sglang import DIGEST_LOADER
from verl_sync_plugin.rollouts.sglang.refusals import AT_LAUNCH, refuse_arguments
from verl_sync_plugin.rollouts.sglang.request import hand_down, new_token
from verl_sync_plugin.rollouts.sglang.updates import WeightUpdates, resolved

IDLE_SECONDS = 10.0

Answered = tuple[list[int], list[float], str]  # tokens, their log-probabilities, why the response ended


class ScriptServer(WeightUpdates):
    """SGLang, launched with ``arguments``, and the calls that a script may make of it, in SGLang's event loop."""

    def __init__(self, arguments: dict[str, Any], timeout_seconds: float, random_weights: bool) -> None:
        import sglang

        hand_down(new_token())
        self.engine = sglang.Engine(**arguments)
        self.tokenizer_manager = self.engine.tokenizer_manager
        refuse_arguments(resolved(self.tokenizer_manager), "engine", "use another model", AT_LAUNCH)
        self.expect_updates(timeout_seconds, random_weights)

    async def _release(self, tags: list[str]) -> None:
        # SGLang answers a request a moment before it is idle, and ends itself when asked to release before that
        if not (self._asleep or await compat.flush_cache(self.tokenizer_manager, timeout_s=IDLE_SECONDS)):
            raise RuntimeError(f"the engine still generates after {IDLE_SECONDS:g} s, so its memory cannot be released")
        await super()._release(tags)

    async def generate(self, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> list[Answered]:
        """One response to each prompt. Raises RuntimeError where the gate is closed, ValueError where SGLang refuses a
        prompt or a sampling parameter."""
        if why := self._gate.closed:
            raise RuntimeError(why)
        if (largest := max(map(max, prompts))) >= (size := self.tokenizer_manager.model_config.vocab_size):
            raise ValueError(f"token id {largest}: the vocabulary has {size} tokens. Give ids below that.")
        request = GenerateReqInput(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        answers = await anext(self.tokenizer_manager.generate_request(request, None))
        answered: list[Answered] = []
        for each in answers:
            meta = each["meta_info"]
            log_probs = [item[0] for item in meta["output_token_logprobs"]]
            answered.append((each["output_ids"], log_probs, meta["finish_reason"]["type"]))
        return answered

    async def abort(self) -> None:
        """Ends all requests."""
        self.tokenizer_manager.abort_request(abort_all=True)

    async def reset_weights(self) -> None:
        """Fills all parameters of all ranks with random numbers, by SGLang's own ``/weights_checker``. Nothing is
        generated from these."""
        self._gate.lose_weights()
        request = CheckWeightsReqInput(action="reset_tensors")
        success, message, *_ = await self.tokenizer_manager.check_weights(request)
        if not success:
            raise RuntimeError(f"SGLang's weights_checker refused reset_tensors: {message}")

    async def digests(self) -> list[dict[str, str]]:
        """For each tensor-parallel rank the digests of its parameters; see ``loader.digests_of``. Raises RuntimeError
        where a rank did not answer; its log says why."""
        found = await self.ask_ranks(DIGEST_LOADER)
        if len(found) < int(self.tokenizer_manager.server_args.tp_size):
            raise RuntimeError("an engine rank did not answer with the digests of its parameters; see its log")
        return found


if __name__ == "__main__":
    process.serve("SGLang", ScriptServer)
