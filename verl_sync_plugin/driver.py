"""What is settled in the driver about the actor's model, before Ray starts."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from verl_sync_plugin import hydra_source
from verl_sync_plugin.config import TRAINERS, TURN_OFF, refuse_adapter_mode, refuse_megatron_lora, sync_config_of
from verl_sync_plugin.lora.refusals import refuse_lora
from verl_sync_plugin.lora.settings import unify

# verl's strategies that read the flat LoRA keys only
FLAT_LORA_TRAINERS = ("fsdp", "fsdp2")


def settle_trainer(actor_rollout_ref: Any) -> None:
    """Refuses what the sync cannot serve of the actor's model and strategy, and makes its LoRA keys one.

    Raises:
        ValueError: names key, value and remedy.
    """
    rollout = actor_rollout_ref.rollout
    colocated = actor_rollout_ref.get("hybrid_engine", True)
    if rollout.get("name") != "sglang" or not sync_config_of(rollout).enabled or not colocated:
        return
    strategy = OmegaConf.select(actor_rollout_ref, "actor.strategy")
    if strategy not in TRAINERS:
        raise ValueError(
            f"actor_rollout_ref.actor.strategy={strategy}: no sharding manager moves its weights to SGLang "
            f"(there are: {', '.join(TRAINERS)}). Use one of these, or {TURN_OFF}."
        )
    if strategy in FLAT_LORA_TRAINERS:
        unify_lora_keys(actor_rollout_ref.model)
        refuse_lora(actor_rollout_ref.model, strategy)
    if strategy == "megatron":
        refuse_adapter_mode(actor_rollout_ref.model)
        refuse_megatron_lora(actor_rollout_ref.actor.megatron, actor_rollout_ref.model)


def unify_lora_keys(model: DictConfig) -> None:
    """Makes ``model.lora.*`` and the flat keys one, where verl itself reads only the flat ones.

    Written into the composed config: every process, verl's own code included, then sees the same.

    Raises:
        ValueError: see ``lora.settings.unify``.
    """
    stock: Any = OmegaConf.to_container(OmegaConf.load(hydra_source.verl_configs() / "model" / "hf_model.yaml"))
    plain: Any = OmegaConf.to_container(model, resolve=True)
    with read_write(model), open_dict(model):
        for key, value in unify(plain, stock).items():
            if value is not None:
                OmegaConf.update(model, key, value, force_add=True)
