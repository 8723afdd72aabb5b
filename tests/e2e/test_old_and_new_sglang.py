# SPDX-License-Identifier: Apache-2.0
"""Trains with several SGLang releases; ``make releases`` rewrites the table in ``docs/releases.md``."""

import os
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e import checks, test_lora
from e2e.releases import INSTALLED, PAGE, RELEASES, row, rows, table
from e2e.runs import DUMMY, ROLLOUT, SMALL_BUCKETS, Setup, main_ppo
from fresh_process import folder_with, passed
from pages import check

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1000)]

OVERRIDES = (DUMMY, SMALL_BUCKETS, f"+{ROLLOUT}.engine_kwargs.sglang.grammar_backend=none")


@pytest.fixture(scope="session", params=list(RELEASES))
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def folder_of_release(release: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if release == INSTALLED:
        return Path(sysconfig.get_path("purelib"))
    return folder_with(tmp_path_factory, f"sglang=={release}", *RELEASES[release])


def test_release_trains_with_the_weights_of_the_plugin_as_the_table_says(
    release: str, folder_of_release: Path, tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    path = () if release == INSTALLED else (str(folder_of_release),)
    setup = Setup(OVERRIDES, steps=2, model=Path(tiny_model("qwen2")), change="versions", path=path)
    trained = main_ppo(setup, tmp_path)
    checks.whole(trained, steps=2, ranks=1)
    server = re.search(r"\(SyncSGLangHttpServer pid=(\d+)\)", trained.text)
    assert server is not None, trained.tail
    # Ray prints "(pid=…)" alone until it knows the actor's name
    said = rf"\((\w+ )?pid={server[1]}\) \[e2e\] sglang {re.escape(release)} from {re.escape(str(folder_of_release))}/"
    assert trained.matching(said), trained.tail
    difference = max(metrics["training/rollout_probs_diff_max"] for metrics in trained.logged.values())
    found = {**rows(), release: row(release, trained.reports, difference, checks.MOST_DIFFERENCE)}
    check(PAGE, "releases", table(found))


def test_an_adapter_is_served(release: str, folder_of_release: Path, tiny_model: Any, tmp_path: Path) -> None:
    path = () if release == INSTALLED else (str(folder_of_release),)
    keys = *OVERRIDES, *test_lora.COMMON, *test_lora.SERVED
    test_lora.served_right(main_ppo(Setup(keys, steps=2, model=Path(tiny_model("qwen2")), path=path), tmp_path))


def test_answers_that_span_a_sync_tell_so(release: str, folder_of_release: Path) -> None:
    """In a pytest of its own, as ``contract/test_pause_modes.py``, which does the same with the installed release."""
    if release == INSTALLED:
        return
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(folder_of_release))))
    tests = "go_on_with_new_weights and not abort"
    assert "2 passed" in passed("contract/pause_modes.py", "-k", tests, PYTHONPATH=path)
