# SPDX-License-Identifier: Apache-2.0
"""The canary: after a sync the trainer's log-probabilities of fixed prompts are compared with the engine's.

trainer    every rank scores the prompts, right behind the move of the weights, when the KV cache is not yet awake
engine     the leader has its engine score them, when all of it is awake and before any other request is let in

Bytes show that the engine holds what was sent; this shows that it computes with it: scales that it derives, captured
graphs, kernels, and the config it was launched with.
"""

from __future__ import annotations

from verl_sync_plugin.config.settings import KEY_PREFIX, SyncConfig
from verl_sync_plugin.log import say
from verl_sync_plugin.report.sync_report import SyncReport
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.trainers.base import TrainerBackend
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.verify.canary import RESPONSE_TOKENS, Apart, LogProbs, apart, canary_prompts

FIRST_SYNCS = 3  # what ``canary_every=first`` looks at


class Canary:
    """One trainer rank's part in it.

    Args:
        config: whether, how often, and how far apart the two may be.
        agreement: where the ranks settle.
        endpoint: the engine.
    """

    def __init__(self, config: SyncConfig, agreement: Agreement, endpoint: RolloutEndpoint) -> None:
        self._config = config
        self._agreement = agreement
        self._endpoint = endpoint
        self._syncs = 0  # that had one, or would have had one
        self._failed = False  # the last one failed its sync; the next has one whatever the cadence says
        self._prompts: list[list[int]] = []
        self._trained: LogProbs = []

    @property
    def asked(self) -> bool:
        """Whether the trainer has scored the prompts of the sync under way, so that the engine is to score them."""
        return bool(self._trained)

    def _due(self) -> bool:
        every = self._config.canary_every
        if self._config.canary == "never":
            return False
        if self._failed or every == "always":
            return True
        return self._syncs < FIRST_SYNCS if every == "first" else self._syncs % int(every) == 0

    def ask_trainer(self, trainer: TrainerBackend, report: SyncReport) -> None:
        """Behind the move of the weights: every rank scores the prompts, where this sync has a canary. Collective.

        Raises:
            SyncError: it failed on any rank; the same text on every rank.
        """
        self._trained = []
        if self._due():
            with report.stage("canary"):
                self._agreement.settle("moving the weights")  # a rank with an error would leave the others alone
                self._prompts = self._prompts or canary_prompts(trainer.vocabulary)
                scored = self._agreement.run("the canary of the trainer", trainer.log_probs(self._prompts))
                self._agreement.settle("the canary of the trainer")
                self._trained = scored or []
                self._failed = True  # until the engine has agreed
        self._syncs += 1

    async def ask_engine(self, report: SyncReport) -> None:
        """Every engine is all awake and its gate shut: its leader compares. Collective.

        Raises:
            SyncError: with ``enforce``, an engine is further apart than ``canary_threshold``; or any engine could not
                be asked. The same text on every rank.
        """
        with report.stage("canary"):
            await self._agreement.step_async("the canary of the engine", lambda: self._compare(report))
            self._trained, self._failed = [], False

    async def _compare(self, report: SyncReport) -> None:
        """On a leader: says what is too far apart.

        Raises:
            RuntimeError: something is, with ``enforce``.
        """
        if not self._endpoint.leader:
            return
        scored = await self._endpoint.score(self._prompts, RESPONSE_TOKENS)
        outside, inside = apart(self._trained, scored.prompts), apart(scored.rescored, scored.decoded)
        report.canary_difference, report.canary_decode_difference = outside.worst, inside.worst
        said = self._too_far("the trainer's log-probabilities and the engine's", outside)
        said = said or self._too_far(
            "the engine's log-probabilities of tokens it decodes and of the same it reads", inside
        )
        if said and self._config.canary == "enforce":
            raise RuntimeError(said)
        if said:
            say(f"WARNING: sync of step {report.global_steps}: {said}")

    def _too_far(self, what: str, found: Apart) -> str:
        threshold = self._config.canary_threshold
        if found.worst <= threshold:
            return ""
        return (
            f"canary: {what} differ by {found.worst:.4f} on average over prompt {found.prompt} (largest "
            f"{found.largest:.4f}; {KEY_PREFIX}.canary_threshold={threshold:g}), although the bytes arrived. Compare "
            "the engine's settings with the trainer's (dtype, attention, quantization, rope), see whether "
            f"{KEY_PREFIX}.verify=always finds more, or raise {KEY_PREFIX}.canary_threshold if such a difference is "
            "what these kernels make."
        )
