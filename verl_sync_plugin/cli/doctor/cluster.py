# SPDX-License-Identifier: Apache-2.0
"""The same check on every node of a Ray cluster that is running already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from verl_sync_plugin.cli.doctor.findings import problem
from verl_sync_plugin.cli.doctor.node import check_node

NODE_SECONDS = 900
ERRORS_ONLY = 40  # the level of Python's logging
# Ray hides all GPUs from a task that asks for none. verl's workers set this variable, too
ENVIRONMENT = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}


class NoClusterError(Exception):
    """There is no Ray cluster to be asked; the text says which was looked for, and why."""


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, as a driver of the cluster at ``address`` (``auto``: the one that ``ray start`` began here).

    Raises:
        NoClusterError: there is none, or it is of another version.
    """
    import ray

    mine = not ray.is_initialized()
    try:
        if mine:
            ray.init(address, log_to_driver=False, logging_level=ERRORS_ONLY)
    except Exception as error:
        raise NoClusterError(f"{address}: {' '.join(str(error).split())[:300]}") from error
    try:
        yield ray
    finally:
        if mine:
            ray.shutdown()


def check_cluster(address: str) -> list[dict[str, Any]]:
    """``check_node`` of every node that is alive, each with its name (``node``) and ``address``.

    A node that cannot run it, because the plugin is not installed there for example, has a finding that says so.

    Raises:
        NoClusterError: see ``connected``.
    """
    with connected(address) as ray:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        alive = [node for node in ray.nodes() if node["Alive"]]
        remote = ray.remote(num_cpus=0, max_retries=0, runtime_env=ENVIRONMENT)(check_node)
        asked = [
            remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
            for node in alive
        ]
        return [
            {"node": name, "address": node["NodeManagerAddress"], **_answer(ray, future)}
            for name, node, future in zip(_names(alive), alive, asked, strict=True)
        ]


def _names(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """Host names; with the beginning of Ray's id where several nodes have the same."""
    hosts = [node["NodeManagerHostname"] for node in nodes]
    return [
        host if hosts.count(host) == 1 else f"{host} ({node['NodeID'][:6]})"
        for host, node in zip(hosts, nodes, strict=True)
    ]


def _answer(ray: Any, future: Any) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = ray.get(future, timeout=NODE_SECONDS)
        return answer
    except Exception as error:
        text = " ".join(str(error).split())
        if "verl_sync_plugin" in text and "No module named" in text:
            remedy = "pip install it there, or in the image"
            found = problem("plugin", "the plugin is not installed on this node", remedy)
        else:
            remedy = "run verl-sync doctor on that node itself"
            found = problem("node", f"the check did not end: {type(error).__name__}: {text[-300:]}", remedy)
        return {"versions": {}, "machine": None, "findings": [found.as_dict()]}
