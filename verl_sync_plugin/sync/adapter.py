# SPDX-License-Identifier: Apache-2.0
"""Adapter mode (``lora.merge=False``): the base travels at most once, then only the adapter's factors.

gather     every trainer rank gathers all factors, whole                        -- settle
hand out   where the engines are apart: trainer rank 0 tells all ranks          -- settle
deliver    the leader of every engine has its adapter replaced                  -- settle
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import torch

from verl_sync_plugin.config.settings import KEY_PREFIX, SyncConfig
from verl_sync_plugin.report.sync_report import SyncReport
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.trainers.base import ServedAdapter
from verl_sync_plugin.trainers.bounded import reached
from verl_sync_plugin.transport.agreement import Agreement

Adapter = tuple[dict[str, Any], dict[str, torch.Tensor]]  # fields of PEFT's LoraConfig, and factors by name
TARGETS = "actor_rollout_ref.model.lora.target_modules"


class AdapterSender:
    """Sends one adapter, again and again.

    Peak memory: the whole adapter on the device of every rank in the trainer's and the wire dtype, and twice on the
    host of a leader.

    Args:
        adapter: of the trainer.
        dtype: in which the factors travel.
        sync: whether NaN and Inf are refused, and how long other ranks are waited for.
    """

    def __init__(self, adapter: ServedAdapter, dtype: torch.dtype, sync: SyncConfig) -> None:
        self._adapter = adapter
        self._dtype = dtype
        self._sync = sync
        self._sent = 0

    async def send(
        self, agreement: Agreement, endpoint: RolloutEndpoint, report: SyncReport, version: str | None
    ) -> None:
        """Collective over all trainer ranks.

        Raises:
            SyncError: any rank or engine failed; the same text on every rank.
        """
        try:
            factors = self._factors(agreement, report)
            with report.stage("deliver_adapter"):
                await agreement.step_async(
                    "loading the adapter", lambda: _deliver(endpoint, self._adapter.settings, factors, report, version)
                )
        finally:
            self._adapter.release()

    def adapter(self, agreement: Agreement, report: SyncReport) -> Adapter:
        """Collective over all trainer ranks: settings and whole factors, on the host of rank 0 and elsewhere empty.

        Raises:
            SyncError: any trainer rank failed; the same text on every one.
        """
        try:
            factors = self._factors(agreement, report)
            return dict(self._adapter.settings), {} if agreement.ranks.rank else _on_host(factors)
        finally:
            self._adapter.release()

    def _factors(self, agreement: Agreement, report: SyncReport) -> dict[str, torch.Tensor]:
        self._sent += 1
        with report.stage("plan"):
            agreement.step("planning the adapter", self._adapter.look)
        with report.stage("gather"):
            run = f"adapter {agreement.number}.{self._sent}"
            factors = agreement.run("gathering the adapter", self._gather(run)) or {}
        agreement.settle("gathering the adapter")
        return factors

    def _gather(self, run: str) -> Generator[None, None, dict[str, torch.Tensor]]:
        found = yield from self._adapter.gather(run)
        if not found:
            raise ValueError(f"{TARGETS}: the trainer's adapter has no parameters. Name modules that the model has.")
        for device in {factor.device for factor in found.values()}:
            reached(device, self._sync.timeout_seconds)  # what follows waits for it without a bound
        if self._sync.check_finite:
            _refuse_broken(found)
        return {name: factor.to(self._dtype) for name, factor in found.items()}


async def send_apart(
    sender: AdapterSender | None,
    own: Agreement,
    agreement: Agreement,
    endpoint: RolloutEndpoint,
    report: SyncReport,
    version: str | None,
) -> None:
    """Collective over trainer ranks and those beside separate engines: the engines' adapters become the trainer's.

    Peak memory: the whole adapter on the host of every rank.

    Args:
        sender: of a trainer rank; ``None`` beside an engine.
        own: the trainer's ranks among themselves.
        agreement: all ranks; the first is the trainer's first.
        endpoint: the engine beside this rank, if there is one.
        report: of the sync.
        version: see ``RolloutEndpoint.start_load``.

    Raises:
        SyncError: any rank or engine failed; the same text on every rank.
    """
    gathered: Adapter | None = None
    with agreement.attempt():
        gathered = None if sender is None else sender.adapter(own, report)
    agreement.settle("gathering the adapter")
    with report.stage("deliver_adapter"):
        handed = agreement.share("handing out the adapter", gathered)
        assert handed is not None, "the first rank is the trainer's"
        settings, factors = handed

        async def deliver() -> None:
            endpoint.refuse_adapter(settings)
            await _deliver(endpoint, settings, factors, report, version)

        await agreement.step_async("loading the adapter", deliver)


async def _deliver(
    endpoint: RolloutEndpoint,
    settings: Mapping[str, Any],
    factors: dict[str, torch.Tensor],
    report: SyncReport,
    version: str | None,
) -> None:
    """The leader of an engine has its adapter replaced."""
    if not endpoint.leader:
        return
    outcome = await endpoint.load_adapter(settings, _on_host(factors), version)
    report.stages = {"sleep": outcome.sleep_seconds, **report.stages}
    report.nbytes += outcome.nbytes
    report.tensors += len(factors)


def _on_host(factors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cloned: a view would be pickled with the whole bucket it lies in."""
    return {name: factor.cpu().clone() for name, factor in factors.items()}


def _refuse_broken(factors: dict[str, torch.Tensor]) -> None:
    maxima = torch.stack([norm.float() for norm in torch._foreach_norm(list(factors.values()), float("inf"))])
    for key, fine in zip(factors, maxima.isfinite().tolist(), strict=True):
        if not fine:
            raise ValueError(
                f"parameter {key!r} holds NaN or Inf in the trainer; the engine was not given it. Look at the last "
                f"optimizer step, or set {KEY_PREFIX}.check_finite=False to sync it anyway"
            )
