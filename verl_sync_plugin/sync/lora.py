# SPDX-License-Identifier: Apache-2.0
"""Adapter mode (``lora.merge=False``): the base travels until all engines have it, then only the adapter's factors.

gather     every rank gathers all factors, whole                                -- settle
deliver    the leader of every engine has its adapter replaced                  -- settle
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch

from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.trainers.base import ServedAdapter, dtype_name
from verl_sync_plugin.trainers.lora import await_device
from verl_sync_plugin.transport.agreement import Agreement

TARGETS = "actor_rollout_ref.model.lora.target_modules"
Factors = dict[str, torch.Tensor]  # whole, by their names in an adapter checkpoint


def gathered(
    adapter: ServedAdapter, run: str, dtype: torch.dtype, timeout_seconds: float
) -> Generator[None, None, Factors]:
    """All factors in the wire's ``dtype``; ``run`` as for ``ServedAdapter.gather``, and collective as that is. Raises
    ValueError where there are none, or one is broken.

    Peak memory: the whole adapter on the device of every rank in the trainer's and the wire dtype, and twice on the
    host of a leader.
    """
    found = yield from adapter.gather(run)
    if not found:
        raise ValueError(f"{TARGETS}: the trainer's adapter has no parameters. Name modules that the model has.")
    for device in {factor.device for factor in found.values()}:
        await_device(device, timeout_seconds)  # what follows waits for it without a bound
    sent = {name: factor.to(dtype) for name, factor in found.items()}
    _refuse_broken(sent, found)
    return sent


async def deliver(
    agreement: Agreement, endpoint: RolloutEndpoint, settings: Mapping[str, Any], factors: Callable[[], Factors],
    report: SyncReport, version: str | None,
) -> None:  # fmt: skip
    """Collective: the leader of an engine has its adapter replaced. Raises SyncError where any rank or engine failed;
    the same text on every rank."""
    with agreement.attempt():
        if endpoint.leader and not agreement.failed:
            # Cloned: a view would be pickled with the whole bucket it lies in
            on_host = {name: factor.cpu().clone() for name, factor in factors().items()}
            slept, nbytes = await endpoint.load_adapter(settings, on_host, version)
            report.stages = {"sleep": slept, **report.stages}
            report.nbytes += nbytes
            report.tensors += len(on_host)
    agreement.settle("loading the adapter")


def _refuse_broken(sent: Factors, factors: Factors) -> None:
    maxima = torch.stack([norm.float() for norm in torch._foreach_norm(list(sent.values()), float("inf"))])
    for key, fine in zip(sent, maxima.isfinite().tolist(), strict=True):
        if not fine:
            why = "holds NaN or Inf in the trainer"
            if bool(factors[key].isfinite().all()):
                why = f"exceeds the range of {dtype_name(sent[key].dtype)}, in which it travels"
            raise ValueError(f"parameter {key!r} {why}; the engine was not given it. Look at the last optimizer step")
