# SPDX-License-Identifier: Apache-2.0
"""``verl-sync doctor --ray`` over two nodes of a local Ray cluster, one of which differs."""

import os
from pathlib import Path
from unittest import mock

import pytest
from ray.cluster_utils import Cluster

from fresh_process import doctor, stand_in

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(400)]


def test_findings_are_of_the_node_that_has_them_and_versions_that_differ_are_named(tmp_path: Path) -> None:
    """The second node believes to have another PEFT, and loads no plugins of verl's."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    there = {"PYTHONPATH": stand_in(tmp_path, "peft", "0.1.0"), "VERL_USE_EXTERNAL_PLUGINS": "none"}
    try:
        with mock.patch.dict(os.environ, there):
            cluster.add_node(num_cpus=1)
        told = doctor(tmp_path, "--ray", cluster.address)
    finally:
        cluster.shutdown()
    assert len(told.found["nodes"]) == 3, "this machine and two nodes"
    here, *nodes = told.found["nodes"]
    for node in (here, *nodes):
        assert {"entry-point", "gpu", "shm", "ulimit/nofile"} <= {each["check"] for each in node["findings"]}
    assert all(node["address"] for node in nodes) and len({node["node"] for node in nodes}) == 2
    bad = [{each["check"] for each in node["findings"] if each["level"] != "ok"} for node in told.found["nodes"]]
    assert sorted(bad, key=len) == [set(), set(), {"whitelist"}] and told.code == 1
    (found,) = told.found["findings"]
    assert found["check"] == "nodes/peft" and found["level"] == "warning"
    assert "0.1.0 on " in found["text"] and "one image" in found["remedy"]
