# SPDX-License-Identifier: Apache-2.0
"""Adapter mode (``lora.merge=False``): the base travels at most once, then only the adapter's factors.

gather     every rank gathers all factors, whole                                -- settle
deliver    the leader of every engine has its adapter replaced                  -- settle
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import partial
from typing import Any

import torch

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.trainers.base import ServedAdapter
from verl_sync_plugin.trainers.lora import reached
from verl_sync_plugin.transport.agreement import Agreement

TARGETS = "actor_rollout_ref.model.lora.target_modules"


class AdapterSender:
    """Sends one adapter, again and again.

    Peak memory: the whole adapter on the device of every rank in the trainer's and the wire dtype, and twice on the
    host of a leader.

    Args:
        adapter: of the trainer.
        dtype: in which the factors travel.
        sync: how long other ranks are waited for.
    """

    def __init__(self, adapter: ServedAdapter, dtype: torch.dtype, sync: SyncConfig) -> None:
        self._adapter = adapter
        self._dtype = dtype
        self._sync = sync
        self._gathered = 0

    async def send(
        self, agreement: Agreement, endpoint: RolloutEndpoint, report: SyncReport, version: str | None
    ) -> None:
        """Collective over all trainer ranks, each of which has an engine rank.

        Raises:
            SyncError: any rank or engine failed; the same text on every rank.
        """
        try:
            factors = self.gather(agreement, report)
            with report.stage("deliver_adapter"):
                work = partial(deliver, endpoint, self.settings, factors, report, version)
                await agreement.step_async("loading the adapter", work)
        finally:
            self.release()

    @property
    def settings(self) -> Mapping[str, Any]:
        """Fields of PEFT's ``LoraConfig``."""
        return self._adapter.settings

    def gather(self, agreement: Agreement, report: SyncReport) -> dict[str, torch.Tensor]:
        """All factors by their names in an adapter checkpoint, whole, in the wire's dtype. Collective over the
        trainer's ranks; ``release`` comes later.

        Raises:
            SyncError: any rank failed; the same text on every rank.
        """
        self._gathered += 1
        with report.stage("plan"):
            agreement.step("planning the adapter", self._adapter.look)
        with report.stage("gather"):
            run = f"adapter {agreement.number}.{self._gathered}"
            factors = agreement.run("gathering the adapter", self._gather(run)) or {}
        agreement.settle("gathering the adapter")
        return factors

    def release(self) -> None:
        """Drops every reference to the trainer's parameters."""
        self._adapter.release()

    def _gather(self, run: str) -> Generator[None, None, dict[str, torch.Tensor]]:
        found = yield from self._adapter.gather(run)
        if not found:
            raise ValueError(f"{TARGETS}: the trainer's adapter has no parameters. Name modules that the model has.")
        for device in {factor.device for factor in found.values()}:
            reached(device, self._sync.timeout_seconds)  # what follows waits for it without a bound
        sent = {name: factor.to(self._dtype) for name, factor in found.items()}
        _refuse_broken(sent, found)
        return sent


async def deliver(
    endpoint: RolloutEndpoint,
    settings: Mapping[str, Any],
    factors: Mapping[str, torch.Tensor],
    report: SyncReport,
    version: str | None,
) -> None:
    """The leader of an engine has its adapter replaced.

    Args:
        endpoint: this rank's engine.
        settings: fields of PEFT's ``LoraConfig``.
        factors: by their names in an adapter checkpoint, whole.
        report: of the sync under way.
        version: see ``RolloutEndpoint.start_load``.

    Raises:
        RuntimeError: the engine refused it.
    """
    if not endpoint.leader:
        return
    # Cloned: a view would be pickled with the whole bucket it lies in
    on_host = {name: factor.cpu().clone() for name, factor in factors.items()}
    outcome = await endpoint.load_adapter(settings, on_host, version)
    report.stages = {"sleep": outcome.sleep_seconds, **report.stages}
    report.nbytes += outcome.nbytes
    report.tensors += len(factors)


def _refuse_broken(sent: Mapping[str, torch.Tensor], factors: Mapping[str, torch.Tensor]) -> None:
    maxima = torch.stack([norm.float() for norm in torch._foreach_norm(list(sent.values()), float("inf"))])
    for key, fine in zip(sent, maxima.isfinite().tolist(), strict=True):
        if not fine:
            wire = str(sent[key].dtype).removeprefix("torch.")
            held = bool(factors[key].isfinite().all())
            why = f"exceeds the range of {wire}, in which it travels" if held else "holds NaN or Inf in the trainer"
            raise ValueError(f"parameter {key!r} {why}; the engine was not given it. Look at the last optimizer step")
