# SPDX-License-Identifier: Apache-2.0
"""``verl-sync doctor`` on the healthy stack, and in environments that are really broken, each with its remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from doctor_runs import PACKAGE, broken_copy, doctor, environment_without, first_in_path, stand_in
from fresh_process import other_plugin

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SGLANG = "actor_rollout_ref.rollout.name=sglang"
ROLLOUT = "actor_rollout_ref.rollout"
COMMAND = f"python -m verl.trainer.main_ppo {SGLANG} actor_rollout_ref.actor.strategy=fsdp2 {ROLLOUT}.dtype=bfloat16"


def test_healthy_stack_is_ready(tmp_path: Path, tiny_model: object) -> None:
    """With a whole command that was pasted, whose model is there."""
    assert callable(tiny_model)
    told = doctor(tmp_path, "--", *COMMAND.split(), f"actor_rollout_ref.model.path={tiny_model('qwen2')}")
    assert told.code == 0 and told.found["ready"] and not told.bad, told.bad
    assert (told.found["schema"], told.found["level"], told.found["problems"], told.found["warnings"]) == (
        1,
        "ok",
        0,
        0,
    )
    hooks = [check for check in told.findings if check.startswith("hook/")]
    assert len(hooks) == 11 and all("active: " in told.findings[hook]["text"] for hook in hooks)
    assert told.findings["overrides"]["text"] == "weight sync on"
    assert "qwen2: a sync sends 27 tensors" in told.findings["model"]["text"]  # as the log of a run with it
    node = told.found["nodes"][0]
    assert node["versions"]["verl"] == "0.9.1" and node["machine"]["limits"].keys() == {"nofile", "memlock", "nproc"}


def test_whitelist(tmp_path: Path) -> None:
    told = doctor(tmp_path, "--", SGLANG, VERL_USE_EXTERNAL_PLUGINS="none")
    assert told.code == 1 and told.bad == {"whitelist": "problem", "overrides": "problem"}
    assert "VERL_USE_EXTERNAL_PLUGINS=none: verl loads no plugin" in told.findings["whitelist"]["text"]
    assert told.findings["whitelist"]["remedy"] == "unset VERL_USE_EXTERNAL_PLUGINS"
    assert "does not load the plugin" in told.findings["overrides"]["text"]


@pytest.mark.extended
def test_whitelist_without_us(tmp_path: Path) -> None:
    told = doctor(tmp_path, VERL_USE_EXTERNAL_PLUGINS="theirs, other")
    assert told.code == 1 and told.bad == {"whitelist": "problem"}
    assert "verl_sync_plugin is not among them" in told.findings["whitelist"]["text"]
    assert "VERL_USE_EXTERNAL_PLUGINS=theirs,other,verl_sync_plugin" in told.findings["whitelist"]["remedy"]


def source(folder: Path) -> str:
    """A folder with the package and nothing that pip has left beside it."""
    (folder / "source").mkdir()
    (folder / "source" / PACKAGE.name).symlink_to(PACKAGE)
    return str(folder / "source")


@pytest.mark.extended
def test_python_path_instead_of_pip(tmp_path: Path) -> None:
    python = environment_without(tmp_path, "verl_sync_plugin-")
    told = doctor(tmp_path, python=python, PYTHONPATH=source(tmp_path))
    assert told.code == 1 and told.bad == {"entry-point": "problem"}
    assert "was not installed with pip" in told.findings["entry-point"]["text"]
    assert "pip install ." in told.findings["entry-point"]["remedy"]


@pytest.mark.extended
def test_external_module_is_a_way_too(tmp_path: Path) -> None:
    python = environment_without(tmp_path, "verl_sync_plugin-")
    variables = {"PYTHONPATH": source(tmp_path), "VERL_USE_EXTERNAL_MODULES": "verl_sync_plugin.plugin"}
    told = doctor(tmp_path, python=python, **variables)
    assert told.code == 0 and told.bad == {"entry-point": "warning"}
    assert "on every node" in told.findings["entry-point"]["remedy"]
    assert "active: " in told.findings["hook/trainers"]["text"]


@pytest.mark.extended
def test_no_sglang(tmp_path: Path) -> None:
    told = doctor(tmp_path, python=environment_without(tmp_path, "sglang"), PYTHONPATH=source(tmp_path))
    assert told.code == 1 and told.bad["version/sglang"] == "problem"
    assert "pip install sglang==0.5.12" in told.findings["version/sglang"]["remedy"]
    for hook in ("rollout-adapter", "rollout-replica"):
        assert told.bad[f"hook/{hook}"] == "problem"
        assert "'sglang'" in told.findings[f"hook/{hook}"]["remedy"]
    assert "active: " in told.findings["hook/training-engines"]["text"], "what does not need it is active"


@pytest.mark.parametrize(
    ("package", "version", "level"),
    [
        ("verl", "0.8.0", "problem"),
        pytest.param("sglang", "0.5.9", "problem", marks=pytest.mark.extended),
        pytest.param("sglang", "0.5.17", "warning", marks=pytest.mark.extended),
    ],
)
def test_version(tmp_path: Path, package: str, version: str, level: str) -> None:
    told = doctor(
        tmp_path, PYTHONPATH=stand_in(tmp_path, package, version), VERL_USE_EXTERNAL_PLUGINS="none"
    )  # which is quicker, and another finding
    check = f"version/{package}"
    assert told.code == 1 and told.bad[check] == level
    assert f"{package} {version}" in told.findings[check]["text"]
    assert f"pip install {package}==" in told.findings[check]["remedy"]


def test_another_plugin_was_there_first(tmp_path: Path) -> None:
    site = other_plugin(
        tmp_path,
        """
        from verl.workers.rollout.base import _ROLLOUT_REGISTRY
        _ROLLOUT_REGISTRY["sglang", "async"] = "other_plugin.Adapter"
        """,
    )
    told = doctor(tmp_path, PYTHONPATH=first_in_path(site))
    assert told.code == 1 and told.bad == {"import": "problem"}
    assert "already taken by 'other_plugin.Adapter'" in told.findings["import"]["text"]
    assert "VERL_USE_EXTERNAL_PLUGINS=verl_sync_plugin" in told.findings["import"]["remedy"]
    assert "other-plugin 1.0" in told.findings["other-plugins"]["text"]


@pytest.mark.extended
def test_other_plugins_that_take_keys_later(tmp_path: Path) -> None:
    """Each key that our entries can be replaced under without an error, by a plugin that comes after ours."""
    site = other_plugin(
        tmp_path,
        """
        import wrapt

        class Stranger: ...

        def adapter(base):
            base._ROLLOUT_REGISTRY["sglang", "async"] = "other_plugin.Stranger"

        def backend(base):
            base.CheckpointEngineRegistry._registry["sync_plugin"] = Stranger

        def trainer(base):
            base.TRAINER_REGISTRY["sync"] = Stranger

        def later(_):
            import verl.trainer.ppo.v1, verl.workers.rollout.base, verl.checkpoint_engine.base
            adapter(verl.workers.rollout.base)
            backend(verl.checkpoint_engine.base)
            trainer(verl.trainer.ppo.v1.trainer_base)

        wrapt.register_post_import_hook(later, "verl_sync_plugin.hooks.engines")
        """,
    )
    told = doctor(tmp_path, PYTHONPATH=first_in_path(site))
    taken = {"hook/rollout-adapter", "hook/checkpoint-engine", "hook/trainers"}
    assert told.code == 1 and told.bad == dict.fromkeys(taken, "problem")
    for check in taken:
        assert "another plugin took its place" in told.findings[check]["text"]
        assert "other_plugin.Stranger (of other-plugin)" in told.findings[check]["text"]
        assert "pip uninstall other-plugin" in told.findings[check]["remedy"]


@pytest.mark.extended
def test_taken_training_engine(tmp_path: Path) -> None:
    site = other_plugin(
        tmp_path,
        """
        import wrapt

        def take(base):
            from verl.workers.engine.base import BaseEngine, EngineRegistry

            class Stranger(BaseEngine): ...

            EngineRegistry.register("language_model", "fsdp2", device="cuda", vendor="nvidia")(Stranger)

        wrapt.register_post_import_hook(take, "verl.workers.engine.fsdp")
        """,
    )
    told = doctor(tmp_path, PYTHONPATH=first_in_path(site))
    assert told.code == 1 and told.bad["hook/training-engines"] == "problem"
    assert "is already taken" in told.findings["hook/training-engines"]["text"]
    assert "uninstall one of the two plugins" in told.findings["hook/training-engines"]["remedy"]


@pytest.mark.parametrize(
    ("module", "check"),
    [
        ("hooks/separate.py", "hook/checkpoint-engine"),
        *(
            pytest.param(*each, marks=pytest.mark.extended)
            for each in [
                ("compat.py", "import"),
                ("config/settings.py", "import"),
                ("rollouts/sglang/loader.py", "hook/engine-loader"),
            ]
        ),
    ],
)
def test_hook_that_cannot_be_imported(tmp_path: Path, module: str, check: str) -> None:
    told = doctor(tmp_path, PYTHONPATH=broken_copy(tmp_path, module))
    assert told.code == 1 and told.bad[check] == "problem"
    assert "ImportError: broken on purpose" in told.findings[check]["text"]
    assert "pip install --force-reinstall" in told.findings[check]["remedy"]


def test_variables_and_limits(tmp_path: Path) -> None:
    told = doctor(
        tmp_path,
        files=512,
        PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64,expandable_segments:True",
        NCCL_CUMEM_ENABLE="1",
        VERL_USE_EXTERNAL_PLUGINS="none",
    )
    expected = {"whitelist": "problem", "expandable-segments": "problem"}
    assert told.code == 1 and told.bad == expected | {"nccl-cumem": "warning", "ulimit/nofile": "warning"}
    assert "out of PYTORCH_CUDA_ALLOC_CONF" in told.findings["expandable-segments"]["remedy"]
    assert "unset NCCL_CUMEM_ENABLE" in told.findings["nccl-cumem"]["remedy"]
    assert "nofile is 512" in told.findings["ulimit/nofile"]["text"]
    assert "ulimit -n 65536" in told.findings["ulimit/nofile"]["remedy"]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("override", "level", "text", "remedy"),
    [
        (f"{ROLLOUT}.custom.sync.timeout_secs=3", "problem", "timeout_secs=3: unknown key", "sync.timeout_seconds"),
        (f"{ROLLOUT}.custom.sync.enabled=False", "warning", "stock verl moves the weights", "leave out"),
    ],
)
def test_overrides(tmp_path: Path, override: str, level: str, text: str, remedy: str) -> None:
    """In a real process; what else is refused is in ``test_doctor_checks.py``."""
    told = doctor(tmp_path, "--", SGLANG, "actor_rollout_ref.model.path=some/name", override)
    assert told.code == (1 if level == "problem" else 0) and told.bad == {"overrides": level}
    assert text in told.findings["overrides"]["text"] and remedy in told.findings["overrides"]["remedy"]


def test_no_cluster(tmp_path: Path) -> None:
    told = doctor(tmp_path, "--ray", "127.0.0.1:1", VERL_USE_EXTERNAL_PLUGINS="none")
    assert told.code == 1 and told.bad["ray"] == "problem"
    assert "127.0.0.1:1" in told.findings["ray"]["text"] and "ray start --head" in told.findings["ray"]["remedy"]
