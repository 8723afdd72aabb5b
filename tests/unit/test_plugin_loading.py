# SPDX-License-Identifier: Apache-2.0
"""Loading by verl, in fresh processes: quick, and never silently absent."""

from pathlib import Path

import pytest

from fresh_process import broken, first_in_path, other_plugin, python, said

LIMIT = 0.1  # seconds that importing the plugin may add to importing verl


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
    [{}, {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "verl_sync_plugin.plugin"}],
    ids=["entry point", "module"],
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


def test_broken_plugin_stops_the_process(tmp_path: Path) -> None:
    """verl swallows a plugin's exception and would go on with its own weight sync."""
    path = str(broken(tmp_path, "config/settings.py"))
    ended = python(tmp_path, "import verl; print('went on')", PYTHONPATH=path, VERL_PLATFORM="")
    assert "went on" not in ended.stdout and ended.returncode != 0
    assert ended.stderr.count("verl-sync-plugin cannot be loaded: ImportError: broken on purpose") == 1
    assert "VERL_USE_EXTERNAL_PLUGINS=none" in ended.stderr


def test_a_verl_that_the_plugin_cannot_enter_stops_the_process(tmp_path: Path) -> None:
    """A key that is taken: ``test_commands.py``; one that is taken later: ``test_registry.py``."""
    site = other_plugin(tmp_path, "from verl.workers.rollout import base\ndel base._ROLLOUT_REGISTRY\n")
    ended = python(tmp_path, "import verl; print('went on')", PYTHONPATH=str(site))
    assert ended.returncode != 0 and "went on" not in ended.stdout
    text = "IncompatibleHostError: verl 0.9.1 does not offer verl.workers.rollout.base._ROLLOUT_REGISTRY"
    assert f"verl-sync-plugin cannot be loaded: {text}" in ended.stderr, ended.stderr
    assert ended.stderr.count("supports verl >=0.9,<0.11: pip install verl==0.9.1") == 1, "one message, not two"


def test_a_verl_before_entry_points_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "verl").mkdir()
    text = "__version__ = '0.8.0'; import verl_sync_plugin.plugin; print('went on')"
    (tmp_path / "verl" / "__init__.py").write_text(text)
    ended = python(tmp_path, "import verl", PYTHONPATH=first_in_path(tmp_path), VERL_PLATFORM="")
    assert ended.returncode == 1 and "went on" not in ended.stdout
    (line,) = ended.stderr.splitlines()
    assert "verl 0.9 or newer is needed, and verl 0.8.0 is installed. Install verl==0.9.1, or take" in line


STRANGE_TRAINERS = """
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer

    class StrangeTrainer(PPOTrainer):
        pass

    TRAINER_REGISTRY["sync"] = TRAINER_REGISTRY["theirs"] = StrangeTrainer
"""


def test_trainers_of_another_plugin_report_too_and_import_no_sglang(tmp_path: Path) -> None:
    """Once SGLang is imported, transformers builds models with uninitialized rotary frequencies."""
    site = other_plugin(tmp_path, STRANGE_TRAINERS)
    output = said(
        tmp_path,
        """
        import sys
        import verl
        from verl.trainer.ppo.v1 import get_trainer_cls
        import verl_sync_plugin.hooks.worker
        assert "sglang" not in sys.modules
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
