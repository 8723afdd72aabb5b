# SPDX-License-Identifier: Apache-2.0
"""Loading through verl's entry point, in fresh processes: quick, and never silently absent."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from fresh_process import broken, first_in_path, other_plugin, python
from ports import free_port

LIMIT = 0.1  # seconds that importing the plugin may add to importing verl


def said(folder: Path, code: str, **environment: str) -> str:
    """The output of code in a fresh interpreter, which ends well."""
    ended = python(folder, code, **environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_import_is_quick_and_light(tmp_path: Path) -> None:
    """Measured in forks of one process that has imported verl without plugins; the best of three counts."""
    output = said(
        tmp_path,
        """
        import os, sys, time
        import verl
        assert "verl_sync_plugin.plugin" not in sys.modules
        before = set(sys.modules)
        for _ in range(3):
            if os.fork() == 0:
                start = time.perf_counter()
                import verl_sync_plugin.plugin
                print(time.perf_counter() - start, *sorted(set(sys.modules) - before), flush=True)
                os._exit(0)
            assert os.wait()[1] == 0
        """,
        VERL_USE_EXTERNAL_PLUGINS="none",
    )
    lines = [line.split() for line in output.splitlines() if "verl_sync_plugin.plugin" in line]
    assert len(lines) == 3 and min(float(words[0]) for words in lines) <= LIMIT, output
    heavy = ("verl.workers", "verl.trainer", "torch", "ray", "sglang", "transformers", "hydra", "verl_sync_plugin.hook")
    assert [name for name in lines[0] if name.startswith(heavy)] == []


@pytest.mark.parametrize(
    "route",
    [
        {},
        {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "verl_sync_plugin.plugin"},
        {"VERL_USE_EXTERNAL_MODULES": "verl_sync_plugin.plugin"},
    ],
    ids=["entry point", "module", "both"],
)
def test_verl_loads_the_plugin_and_not_its_engines(tmp_path: Path, route: dict[str, str]) -> None:
    """By either of verl's routes: the entry point, and the list of modules that each of its processes imports."""
    output = said(
        tmp_path,
        """
        import sys
        import verl
        assert "verl_sync_plugin.plugin" in sys.modules
        assert "verl.workers.engine" not in sys.modules
        from verl.workers.rollout.base import _ROLLOUT_REGISTRY
        assert _ROLLOUT_REGISTRY["sglang", "async"] == "verl_sync_plugin.rollouts.sglang.adapter.SyncServerAdapter"
        assert _ROLLOUT_REGISTRY["vllm", "async"].startswith("verl.")
        from verl.workers.rollout.replica import RolloutReplicaRegistry
        assert RolloutReplicaRegistry._registry["sglang"].__module__ == "verl_sync_plugin.rollouts.sglang"
        assert RolloutReplicaRegistry._registry["vllm"].__module__ == "verl.workers.rollout.replica"
        print("all there")
        """,
        **route,
    )
    assert "all there" in output


@pytest.mark.parametrize("module", ["config/settings.py", "compat.py", "errors.py"])
def test_broken_plugin_stops_the_process(tmp_path: Path, module: str) -> None:
    """verl swallows a plugin's exception and would go on with its own weight sync."""
    path = str(broken(tmp_path, module))
    ended = python(tmp_path, "import verl; print('went on')", PYTHONPATH=path, VERL_PLATFORM="")
    assert "went on" not in ended.stdout and ended.returncode != 0
    assert ended.stderr.count("verl-sync-plugin cannot be loaded: ImportError: broken on purpose") == 1
    assert "VERL_USE_EXTERNAL_PLUGINS=none" in ended.stderr


@pytest.mark.parametrize(
    ("code", "text", "remedy"),
    [
        (  # the adapter's key: ``test_commands.py``
            "replica.RolloutReplicaRegistry.register('sglang', print)",
            "RegistryConflictError: verl's rollout replica for sglang is already taken by <built-in function print>",
            "Uninstall one of the two plugins",
        ),
        (
            "del base._ROLLOUT_REGISTRY",
            "IncompatibleHostError: verl 0.9.1 does not offer verl.workers.rollout.base._ROLLOUT_REGISTRY",
            "supports verl >=0.9,<0.11: pip install verl==0.9.1",
        ),
    ],
    ids=["key taken", "another verl"],
)
def test_a_verl_that_the_plugin_cannot_enter_stops_the_process(
    code: str, text: str, remedy: str, tmp_path: Path
) -> None:
    site = other_plugin(tmp_path, f"from verl.workers.rollout import base, replica\n{code}\n")
    ended = python(tmp_path, "import verl; print('went on')", PYTHONPATH=str(site))
    assert ended.returncode != 0 and "went on" not in ended.stdout
    assert f"verl-sync-plugin cannot be loaded: {text}" in ended.stderr, ended.stderr
    assert ended.stderr.count(remedy) == 1, "one message, not two"


def test_a_missing_engine_and_a_key_taken_later_are_named_where_that_matters(tmp_path: Path) -> None:
    """Where verl asks for the engine's replica, for other processes may run on machines without an engine; and in the
    rollout config."""
    output = said(
        tmp_path,
        """
        import importlib.util as util
        from unittest import mock
        import verl
        from verl.workers.rollout import base, replica
        from verl_sync_plugin.hooks.driver import SyncRolloutConfig
        def attempt(call, *args, **more):
            try:
                call(*args, **more)
            except Exception as error:
                print("refused:", type(error).__name__, error)
        find = util.find_spec
        with mock.patch.object(util, "find_spec", lambda name, *more: None if name == "sglang" else find(name, *more)):
            SyncRolloutConfig(name="sglang", mode="async")
            attempt(replica.RolloutReplicaRegistry.get, "sglang")
        replica.RolloutReplicaRegistry.register("sglang", print)
        for adapter in (base._ROLLOUT_REGISTRY["sglang", "async"], "other.Adapter"):
            base._ROLLOUT_REGISTRY["sglang", "async"] = adapter
            SyncRolloutConfig(name="vllm", mode="async")
            attempt(SyncRolloutConfig, name="sglang", mode="async")
        """,
    )
    assert "refused: ValueError actor_rollout_ref.rollout.name='sglang': SGLang is not installed in " in output
    for what in ("rollout replica", "rollout adapter"):
        assert f"refused: RegistryConflictError verl's {what} for sglang is already taken by" in output


@pytest.mark.parametrize(
    ("module", "ends"), [("verl_sync_plugin.plugin", True), ("verl_sync_plugin", False)], ids=["plugin", "package"]
)
def test_a_verl_before_entry_points_is_named_in_one_line(tmp_path: Path, module: str, ends: bool) -> None:
    """A real one: ``test_other_releases.py``."""
    (tmp_path / "verl").mkdir()
    text = "import importlib, os; __version__ = '0.8.0'; importlib.import_module(os.environ['NAMED']); print('went on')"
    (tmp_path / "verl" / "__init__.py").write_text(text)
    ended = python(tmp_path, "import verl", PYTHONPATH=first_in_path(tmp_path), NAMED=module, VERL_PLATFORM="")
    assert ended.returncode == int(ends) and ("went on" in ended.stdout) is not ends
    (line,) = ended.stderr.splitlines()
    assert line.startswith("verl-sync-plugin: verl 0.9 or newer is needed, and verl 0.8.0 is installed")
    assert "pip install verl==0.9.1, or uninstall" in line


# Keys that another plugin has taken


TAKEN_LATER = """
    import asyncio
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
    adapter = get_rollout_class("sglang")(rollout, HFModelConfig(path="{model}"), mesh)
    try:
        asyncio.run(adapter.update_weights(iter([]), global_steps=1))
    except Exception as error:
        print("ended:", type(error).__name__, error)
"""
# What torch.distributed and verl's worker need of a process of one rank
BY_TORCH = {
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "VERL_PLATFORM": "cpu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("strategies", "vendor", "environment", "what"),
    [
        (
            ("fsdp2",), "nvidia", {},
            r"verl's training engine for fsdp2 is __main__\.StrangeEngine here, where verl-sync-plugin needs its own: "
            r"another plugin has taken the key\. Uninstall one",
        ),
        pytest.param(
            ("fsdp", "fsdp2"), "other", {"VERL_ENGINE_VENDOR": "other"},
            r"verl's training engine for fsdp, fsdp2 is __main__\.StrangeEngine here", marks=pytest.mark.extended,
        ),
        (
            (), "", {"VERL_ENGINE_VENDOR": "other"},
            r"is verl\.workers\.engine\.fsdp\.transformer_impl\.FSDPEngineWithLMHead here, verl's own: .*"
            r"Set VERL_ENGINE_VENDOR=nvidia",
        ),
    ],
    ids=["taken", "more-specific", "other-vendor"],
)  # fmt: skip
def test_an_engine_that_is_not_ours_is_named_and_not_the_strategy(
    tmp_path: Path, tiny_model: Callable[[str], str], strategies: tuple[str, ...], vendor: str,
    environment: dict[str, str], what: str,
) -> None:  # fmt: skip
    output = said(
        tmp_path,
        textwrap.dedent(TAKEN_LATER).format(strategies=strategies, vendor=vendor, model=tiny_model("qwen2")),
        **{**BY_TORCH, "MASTER_PORT": str(free_port()), **environment},
    )
    lines = [line for line in output.splitlines() if line.startswith("ended: ")]
    assert len(lines) == 1 and re.search(f"^ended: RegistryConflictError .*{what}", lines[0]), output
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
    """Covers a plugin, loaded before ours, that replaces one of verl's trainers or adds one."""
    site = other_plugin(tmp_path, textwrap.dedent(STRANGE_TRAINERS) + "take('sync')\ntake('theirs')\n")
    output = said(
        tmp_path,
        """
        import verl
        from verl.trainer.ppo.v1 import get_trainer_cls
        for name in ("sync", "theirs", "colocate_async"):
            trainer = get_trainer_cls(name)
            print(name, trainer.__module__, trainer.__mro__[1].__name__, trainer.__mro__[2].__name__)
        """,
        PYTHONPATH=first_in_path(site),
    )
    assert [line.split() for line in output.splitlines() if "SyncTrainerMixin" in line] == [
        ["sync", "other_plugin", "SyncTrainerMixin", "StrangeTrainer"],
        ["theirs", "other_plugin", "SyncTrainerMixin", "StrangeTrainer"],
        ["colocate_async", "verl.trainer.ppo.v1.trainer_colocate_async", "SyncTrainerMixin", "PPOTrainerColocateAsync"],
    ], output


def test_metrics_that_nobody_logs_are_announced_once(tmp_path: Path) -> None:
    """A trainer that took a name after us; verl's replica is made in its process. The servers are not launched."""
    output = said(
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
    lines = [line for line in output.splitlines() if line.startswith("hybrid") or "NO SYNC METRICS" in line]
    assert [line if line.startswith("hybrid") else "said" for line in lines] == [
        "hybrid False", "said", "hybrid True", "hybrid True",
    ], output  # fmt: skip
