"""Tests that every two plugins of this repository train together for five steps, or are refused by both names.

The full tier plans them all (test_compose_page.py) and trains each plugin with its nearest; this trains all of
them, on both frameworks, which takes an hour or two on one core: ``pytest -m nightly``.
"""

from __future__ import annotations

import pytest

from minillm_kit.check import NotApplicable
from minillm_kit.pairs import pairs
from minillm_kit.subject import Subject
from tools.every_plugin import OPTIONS
from tools.repository import ours

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("name", ours())
def test_it_trains_beside_each_that_comes_after_it(name: str) -> None:
    later = [other for other in ours() if other > name]
    options = OPTIONS.get(name, ({},))[0]
    try:
        print(pairs(Subject(name, options, pairs=None, partners=later)))
    except NotApplicable as reason:
        pytest.skip(str(reason))
