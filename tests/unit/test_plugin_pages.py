"""Tests that the tables of plugins, options and commands match entry points, docstrings and options."""

from __future__ import annotations

import pytest

from tools.pages import Page
from tools.plugin_pages import PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.parent.name)
def test_the_page_is_what_the_source_says(page: Page) -> None:
    assert page.generated() == page.text(), "python -m tools.plugin_pages --write"


def test_every_table_is_marked() -> None:
    marks = [page.text().count("<!-- made: ") for page in PAGES]
    assert marks[0] >= 1
    assert sum(marks) > len(PAGES)
