# SPDX-License-Identifier: Apache-2.0
"""``verl-sync doctor --ray`` over two nodes of a local Ray cluster, one of which differs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster

from doctor_runs import Told, doctor, stand_in

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """The second node believes to have another PEFT, and loads no plugins of verl's."""
    folder = tmp_path_factory.mktemp("cluster")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    there = {"PYTHONPATH": stand_in(folder, "peft", "0.1.0"), "VERL_USE_EXTERNAL_PLUGINS": "none"}
    before = dict(os.environ)
    try:
        os.environ.update(there)
        cluster.add_node(num_cpus=1)
        os.environ.clear()
        os.environ.update(before)
        yield doctor(folder, "--ray", cluster.address)
    finally:
        os.environ.update(before)
        cluster.shutdown()


def test_every_node_is_looked_at(told: Told) -> None:
    assert len(told.found["nodes"]) == 3, "this machine and two nodes"
    here, *nodes = told.found["nodes"]
    for node in (here, *nodes):
        assert {"entry-point", "gpu", "shm", "ulimit/nofile"} <= {each["check"] for each in node["findings"]}
    assert all(node["address"] for node in nodes) and len({node["node"] for node in nodes}) == 2


def test_findings_are_of_the_node_that_has_them(told: Told) -> None:
    bad = [{each["check"] for each in node["findings"] if each["level"] != "ok"} for node in told.found["nodes"]]
    assert sorted(bad, key=len) == [set(), set(), {"whitelist"}] and told.code == 1


def test_versions_that_differ_are_named(told: Told) -> None:
    (found,) = told.found["findings"]
    assert found["check"] == "nodes/peft" and found["level"] == "warning"
    assert "0.1.0 on " in found["text"] and "one image" in found["remedy"]
