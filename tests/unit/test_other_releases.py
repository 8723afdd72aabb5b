# SPDX-License-Identifier: Apache-2.0
"""Other releases of verl and transformers than those installed, from folders; no training (see ``tests/e2e``)."""

from pathlib import Path

import pytest
from test_verl_contract import differences

from fresh_process import doctor, first_in_path, folder_with, passed

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(400)]

SINCE_0_9_0 = {
    "verl.checkpoint_engine.base:CheckpointEngineManager.abort_replicas",  # reject_request
    "verl.workers.rollout.replica:RolloutReplica.abort_all_requests",  # likewise
    "verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangReplica.abort_all_requests",  # likewise
    "verl.workers.rollout.llm_server:FullyAsyncLLMServerClient._acquire_server",  # **extra
    "verl.workers.rollout.router:GlobalRequestLoadBalancer.clear_sticky_cache",  # was in llm_server.py
    "verl.workers.rollout.router:GlobalRequestLoadBalancer.remove_servers",  # likewise
}


def test_an_older_verl_differs_as_known_and_is_served(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    folder = folder_with(tmp_path_factory, "verl==0.9.0")
    assert differences(folder).keys() == SINCE_0_9_0
    told = doctor(tmp_path, PYTHONPATH=first_in_path(folder))
    assert told.code == 0 and not told.bad, told.bad
    assert told.findings["version/verl"]["text"] == "verl 0.9.0"


def test_a_verl_that_cannot_run_it_is_one_finding(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """In the processes of a run: ``test_plugin_loading.py``."""
    told = doctor(tmp_path, PYTHONPATH=first_in_path(folder_with(tmp_path_factory, "verl==0.8.0")))
    assert told.code == 1 and told.findings["version/verl"]["text"].startswith("verl 0.8.0: verl 0.9 or newer, ")
    assert "import" not in told.bad


@pytest.mark.parametrize("version", ["5.19.0", "5.24.0"])
def test_fused_experts_travel_with_a_newer_transformers(version: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without what imports SGLang, which does not go with it."""
    folder = folder_with(tmp_path_factory, f"transformers=={version}", "tokenizers==0.23.3")
    assert " passed" in passed("--noconftest", "unit/test_naming.py", PYTHONPATH=first_in_path(folder))
