# SPDX-License-Identifier: Apache-2.0
"""Extends verl's trainers: they log what each sync cost, and use our actor workers. Extends their clients of a separate
rollout: a server may die, and a call may span a sync."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import ray
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, ActorUnavailableError
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from verl_sync_plugin.config.settings import KEY_PREFIX, ROLLOUT, SEPARATE_BACKEND, SHARES_GPU, sync_config_of
from verl_sync_plugin.errors import HalfWrittenError
from verl_sync_plugin.hooks.driver import apply_keys, backend_of, is_on
from verl_sync_plugin.log import say
from verl_sync_plugin.report import ACTIVE, expect_metrics, metrics_of, timing_of

PROBS_DIFF, PROBS_VALID = "training/rollout_probs_diff_mean", "training/rollout_probs_diff_valid"


class SyncTrainerMixin:
    """Adds reports, settling and the plugin's workers to a trainer of verl; comes before verl's class among the
    bases."""

    def _init_resource_pool_mgr(self: Any, **more: Any) -> None:
        """verl's step that gives classes to roles; before it, a config that no driver has seen is checked."""
        expect_metrics()
        if line := apply_keys(self.config, resolved=True):
            say(f"task runner: {line}")
        super()._init_resource_pool_mgr(**more)  # type: ignore[misc]
        rollout = self.config.actor_rollout_ref.rollout
        if not is_on(rollout):
            return
        take_workers(self.role_worker_mapping)
        reward = self.config.reward.reward_model
        if reward.enable and not reward.enable_resource_pool:
            # Its engine shares the devices and wakes while the actor's sleeps: a cache kept then may take its room
            OmegaConf.update(self.config, f"{ROLLOUT}.custom.{SHARES_GPU}", True, force_add=True)

    def _setup(self: Any, **more: Any) -> None:
        """verl's step that starts the rollouts."""
        super()._setup(**more)  # type: ignore[misc]
        manager = getattr(self, "standalone_checkpoint_manager", None)
        if manager is not None and syncs_separate(self.config.actor_rollout_ref.rollout):
            from verl_sync_plugin.hooks.separate import OutlivingManager

            self.standalone_checkpoint_manager = OutlivingManager(manager, self.standalone_server_manager)

    def get_llm_client(self: Any, **more: Any) -> Any:
        """verl's client of the rollout; ours in place of the one that asks again for what a separate rollout, which the
        plugin syncs, has aborted."""
        client = super().get_llm_client(**more)  # type: ignore[misc]
        if syncs_separate(self.config.actor_rollout_ref.rollout) and type(client) is FullyAsyncLLMServerClient:
            client.__class__ = SeparateLLMServerClient
        return client

    def _compute_old_log_prob(self: Any, batch: Any, metrics: dict[str, Any], **more: Any) -> Any:
        """verl's step that compares the probabilities of engine and trainer; the actor's update comes later. Raises
        RuntimeError where they differ by more than ``custom.sync.max_probs_diff``, or verl does not say."""
        batch = super()._compute_old_log_prob(batch, metrics=metrics, **more)  # type: ignore[misc]
        most = sync_config_of(self.config.actor_rollout_ref.rollout).max_probs_diff
        if most is None or metrics.get(PROBS_VALID) == 0:  # no response has a token
            return batch
        key, found, step = f"{KEY_PREFIX}.max_probs_diff", metrics.get(PROBS_DIFF), f"step {self.global_steps}: "
        if found is None:
            raise RuntimeError(f"{step}verl logged no {PROBS_DIFF}, which {key}={most:g} guards. Remove that key.")
        if not found <= most:
            raise RuntimeError(
                f"{step}{PROBS_DIFF}={found:.4g} exceeds {key}={most:g}: the engine does not compute what the trainer "
                "computes. Compare their settings (dtype, attention, quantization, rope), see whether "
                f"{KEY_PREFIX}.verify=always finds more, or raise {key} if their kernels really differ that much."
            )
        return batch

    def on_step_end(self: Any, **more: Any) -> None:
        """verl's hook; ``update_weights`` has run when the super call returns."""
        super().on_step_end(**more)  # type: ignore[misc]
        separate = getattr(self, "standalone_checkpoint_manager", None)
        replicas = [*self.checkpoint_manager.replicas, *(separate.replicas if separate else ())]
        replicas = [replica for replica in replicas if getattr(replica, "syncs_weights", False)]
        if not replicas:
            return
        pending = dict(getattr(self, "_pending_sync_metrics", None) or {})
        self._pending_sync_metrics = {**pending, ACTIVE: 1.0}  # also in a step without a sync
        if reports := take_reports(replicas):
            self.timing_raw.update(timing_of(reports))
            self._pending_sync_metrics.update(metrics_of(reports))


def syncs_separate(rollout: Any) -> bool:
    """True if the plugin syncs a rollout on GPUs of its own."""
    return is_on(rollout) and backend_of(rollout) == SEPARATE_BACKEND


def take_workers(mapping: dict[Any, Any]) -> None:
    """Replaces verl's worker classes in ``role_worker_mapping`` by ours, for the roles that hold a rollout."""
    from verl_sync_plugin.hooks.worker import OURS

    for role, remote in mapping.items():
        ours = OURS.get(getattr(remote, "__ray_actor_class__", remote)) if "rollout" in str(role) else None
        if ours is not None:
            mapping[role] = ray.remote(ours)
            say(f"task runner: {role} is {ours.__name__}")


def take_reports(replicas: list[Any]) -> list[dict[str, Any]]:
    """The last report of every one of our replicas that has a new one."""
    reports = []
    for asked in [replica.servers[0].take_sync_report.remote() for replica in replicas]:
        with suppress(ActorDiedError, ActorUnavailableError):  # the next sync finds that out
            reports.append(ray.get(asked))
    return [report for report in reports if report is not None]


def reporting(trainer: type) -> type:
    """``trainer`` with reports and our workers; the class keeps its name."""
    return type(trainer.__name__, (SyncTrainerMixin, trainer), {"__module__": trainer.__module__})


# Of the call under way: the server that was asked last, and the version with which each part of the response began
_server: ContextVar[str] = ContextVar("_server")
_first_versions: ContextVar[list[Any]] = ContextVar("_first_versions")


class _Outliving(LLMServerClient):
    """Between verl's two clients: asks another server for what one that has died was asked for, and the same one again
    where a sync has failed."""

    async def _acquire_server(self, *args: Any, **kwargs: Any) -> Any:
        acquired = await super()._acquire_server(*args, **kwargs)
        _server.set(acquired[0])
        return acquired

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        while True:
            _server.set("")
            try:
                output = await super().generate(*args, **kwargs)
            except (ActorUnavailableError, HalfWrittenError):  # no connection, or no weights, at the moment
                await asyncio.sleep(1)
            except ActorDiedError:
                if not _server.get():  # the load balancer has died
                    raise
                # The one with the fewest requests gets the next one, which a dead server soon is
                say(f"rollout server {_server.get()} has died; its requests go to another one")
                await self._load_balancer.remove_servers.remote([_server.get()])
                await self._load_balancer.clear_sticky_cache.remote()
            else:
                _first_versions.get().append(output.extra_fields.get("min_global_steps"))
                return output


class SeparateLLMServerClient(FullyAsyncLLMServerClient, _Outliving):
    """verl's client, for rollouts of which a replica may die, and a call may span a sync. Its ``min_global_steps`` is
    the version with which a response began; verl's is that with which its first part ended."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        noted: list[Any] = []
        _first_versions.set(noted)
        output = await super().generate(*args, **kwargs)
        if noted[0] is not None:
            output.extra_fields["min_global_steps"] = noted[0]
        return output
