# SPDX-License-Identifier: Apache-2.0
"""Other releases of verl and transformers than those installed, from folders; no training (see ``tests/e2e``)."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_verl_contract import differences

from fresh_process import doctor, first_in_path, folder_with, passed, python

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(400)]

SINCE_0_9_0 = {
    "verl.checkpoint_engine.base:CheckpointEngineManager.abort_replicas",  # reject_request
    "verl.workers.rollout.replica:RolloutReplica.abort_all_requests",  # likewise
    "verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangReplica.abort_all_requests",  # likewise
    "verl.workers.rollout.llm_server:FullyAsyncLLMServerClient._acquire_server",  # **extra
    "verl.workers.rollout.router:GlobalRequestLoadBalancer.clear_sticky_cache",  # was in llm_server.py
    "verl.workers.rollout.router:GlobalRequestLoadBalancer.remove_servers",  # likewise
}
TRANSFORMERS = [("transformers==5.19.0", "tokenizers==0.23.3"), ("transformers==5.24.0", "tokenizers==0.23.3")]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with(tmp_path_factory, *request.param)


@pytest.mark.parametrize("folder", [("verl==0.9.0",)], indirect=True, ids=["0.9.0"])
def test_what_differs_in_an_older_verl_is_known_and_the_doctor_finds_every_hook(folder: Path, tmp_path: Path) -> None:
    assert differences(folder).keys() == SINCE_0_9_0
    told = doctor(tmp_path, PYTHONPATH=first_in_path(folder))
    assert told.code == 0 and not told.bad, told.bad
    assert told.findings["version/verl"]["text"] == "verl 0.9.0"


@pytest.mark.parametrize("folder", [("verl==0.8.0",)], indirect=True, ids=["0.8.0"])
def test_a_verl_that_cannot_run_the_plugin_is_named(folder: Path, tmp_path: Path) -> None:
    path = first_in_path(folder)
    ended = python(
        tmp_path, "import verl; print('went on')", PYTHONPATH=path, VERL_USE_EXTERNAL_MODULES="verl_sync_plugin.plugin"
    )
    line = "verl-sync-plugin: verl 0.9 or newer is needed, and verl 0.8.0 is installed"
    assert ended.returncode == 1 and "went on" not in ended.stdout and ended.stderr.count(line) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    told = doctor(tmp_path, PYTHONPATH=path)
    assert told.code == 1 and told.findings["version/verl"]["text"].startswith("verl 0.8.0: verl 0.9 or newer, ")
    assert line in told.stderr and "import" not in told.bad, "one cause is one finding"


@pytest.mark.parametrize("folder", TRANSFORMERS, indirect=True, ids=["5.19.0", "5.24.0"])
def test_fused_experts_travel_with_a_newer_transformers(folder: Path) -> None:
    """Without what imports SGLang, which does not go with it."""
    assert " passed" in passed("--noconftest", "unit/test_naming.py", PYTHONPATH=first_in_path(folder))
