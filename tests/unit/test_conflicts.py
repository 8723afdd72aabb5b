# SPDX-License-Identifier: Apache-2.0
"""Other plugins on verl's registries of training engines and trainers, in fresh processes with the real registries."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import unmeasured
from fresh_process import other_plugin, python
from ports import free_port

TAKEN_LATER = """
    import asyncio, sys
    import verl
    from torch.distributed.device_mesh import init_device_mesh
    from verl.workers.config import HFModelConfig
    from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
    from verl.workers.rollout.base import get_rollout_class
    from verl_sync_plugin.hooks.driver import SyncRolloutConfig

    class StrangeEngine(FSDPEngineWithLMHead):
        pass

    for strategy in {strategies}:
        EngineRegistry._engines["language_model"][strategy]["cuda", "{vendor}"] = StrangeEngine
    rollout = SyncRolloutConfig(name="sglang", mode="async", tensor_model_parallel_size=1)
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=["dp", "infer_tp", "infer_pp"])
    adapter = get_rollout_class("sglang")(rollout, HFModelConfig(path=sys.argv[1]), mesh)
    try:
        asyncio.run(adapter.update_weights(iter([]), global_steps=1))
    except Exception as error:
        print("ended:", type(error).__name__, error)
"""
# What torch.distributed and verl's worker need of a process of one rank
ALONE = {
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "VERL_PLATFORM": "cpu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("strategies", "vendor", "environment", "what"),
    [
        (
            ("fsdp2",),
            "nvidia",
            {},
            r"verl's training engine for fsdp2 is __main__\.StrangeEngine here, where verl-sync-plugin needs its own: "
            r"another plugin has taken the key\. Uninstall one",
        ),
        pytest.param(
            ("fsdp", "fsdp2"),
            "other",
            {"VERL_ENGINE_VENDOR": "other"},
            r"verl's training engine for fsdp, fsdp2 is __main__\.StrangeEngine here",
            marks=pytest.mark.extended,
        ),
        (
            (),
            "",
            {"VERL_ENGINE_VENDOR": "other"},
            r"is verl\.workers\.engine\.fsdp\.transformer_impl\.FSDPEngineWithLMHead here, verl's own: .*"
            r"Set VERL_ENGINE_VENDOR=nvidia",
        ),
    ],
    ids=["taken", "more-specific", "other-vendor"],
)
def test_an_engine_that_is_not_ours_is_named_and_not_the_strategy(
    tmp_path: Path,
    tiny_model: Callable[[str], str],
    strategies: tuple[str, ...],
    vendor: str,
    environment: dict[str, str],
    what: str,
) -> None:
    code = textwrap.dedent(TAKEN_LATER).format(strategies=strategies, vendor=vendor)
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, tiny_model("qwen2")],
        cwd=tmp_path,
        env={**unmeasured.environment(), **ALONE, "MASTER_PORT": str(free_port()), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("ended: ")]
    assert len(lines) == 1 and re.search(f"^ended: RegistryConflictError .*{what}", lines[0]), ended.stdout
    assert "actor.strategy" not in lines[0] and "custom.sync.enabled=False" in lines[0]


STRANGE_TRAINERS = """
    import verl
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer, get_trainer_cls

    class StrangeTrainer(PPOTrainer):
        pass

    def take(name):
        TRAINER_REGISTRY[name] = StrangeTrainer
"""


def test_a_trainer_of_another_plugin_reports_too(tmp_path: Path) -> None:
    """In the place of one of verl's or beside them, by a plugin that is loaded before ours."""
    site = other_plugin(tmp_path, textwrap.dedent(STRANGE_TRAINERS) + "take('sync')\ntake('theirs')\n")
    ended = python(
        tmp_path,
        """
        import verl
        from verl.trainer.ppo.v1 import get_trainer_cls
        for name in ("sync", "theirs", "colocate_async"):
            trainer = get_trainer_cls(name)
            print(name, trainer.__module__, trainer.__mro__[1].__name__, trainer.__mro__[2].__name__)
        """,
        PYTHONPATH=os.pathsep.join([str(site), os.environ["PYTHONPATH"]]),
    )
    assert ended.returncode == 0, ended.stderr
    assert [line.split() for line in ended.stdout.splitlines() if "SyncTrainerMixin" in line] == [
        ["sync", "other_plugin", "SyncTrainerMixin", "StrangeTrainer"],
        ["theirs", "other_plugin", "SyncTrainerMixin", "StrangeTrainer"],
        ["colocate_async", "verl.trainer.ppo.v1.trainer_colocate_async", "SyncTrainerMixin", "PPOTrainerColocateAsync"],
    ], ended.stdout


def test_metrics_that_nobody_logs_are_announced_once(tmp_path: Path) -> None:
    """A trainer that took a name after us; verl's replica is made in its process. The servers are not launched."""
    ended = python(
        tmp_path,
        textwrap.dedent(STRANGE_TRAINERS)
        + textwrap.dedent(
            """
            import asyncio, sys, types
            from verl.workers.rollout.replica import get_rollout_replica_class
            from verl.workers.config import HFModelConfig
            from verl_sync_plugin.hooks.driver import SyncRolloutConfig
            take("sync")
            made = get_rollout_replica_class("sglang")
            group = types.SimpleNamespace(workers=[])
            model = types.SimpleNamespace(path="nowhere")
            def replica(**custom):
                rollout = SyncRolloutConfig(name="sglang", tensor_model_parallel_size=1, custom={"sync": custom})
                found = made(replica_rank=0, config=rollout, model_config=model, gpus_per_node=1)
                found.launch_servers = lambda: asyncio.sleep(0)
                return found
            for each in (replica(enabled=False), replica(), replica()):
                asyncio.run(each.init_hybrid(group))
                print("hybrid", each.syncs_weights)
            """
        ),
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("hybrid") or "NO SYNC METRICS" in line]
    assert [line if line.startswith("hybrid") else "said" for line in lines] == [
        "hybrid False", "said", "hybrid True", "hybrid True",
    ], ended.stdout  # fmt: skip
