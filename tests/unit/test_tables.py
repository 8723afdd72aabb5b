# SPDX-License-Identifier: Apache-2.0
"""The tables that ``make families`` and ``make releases`` write are those of the tests and of the pinned stack."""

from __future__ import annotations

import re

import pytest

from contract.families import FAMILIES
from e2e.releases import PAGE, RELEASES, ROOT, rows, written


def test_every_release_has_its_row_of_this_stack() -> None:
    page = PAGE.read_text()
    assert list(rows(page)) == list(RELEASES), "write it anew: make releases"
    assert written(page, rows(page)) == page, "write it anew: make releases"


@pytest.mark.parametrize("release", RELEASES)
def test_a_row_names_what_was_installed_beside(release: str) -> None:
    beside = rows(PAGE.read_text())[release].split(" | ")[1]
    assert re.findall(r"`([^`]+)`", beside) == list(RELEASES[release]), "write it anew: make releases"


def test_the_readme_names_these_releases() -> None:
    tested = re.search(r"Tested with verl \S+; SGLang ([^;]+);", (ROOT / "README.md").read_text())
    assert tested is not None
    assert re.findall(r"\d+\.\d+\.\d+", tested[1]) == list(RELEASES)


def test_every_family_has_its_row() -> None:
    page = (ROOT / "docs" / "families.md").read_text()
    table = page.partition("<!-- families:begin -->")[2].partition("<!-- families:end -->")[0]
    names = [line.split(" | ")[0].strip("| ") for line in table.splitlines()[3:]]
    assert names == list(FAMILIES), "write it anew: make families"
