"""Every plugin of this distribution under the contract kit, each check a test of its own."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from minillm_kit import conformance

pytestmark = pytest.mark.slow

test_best_fit = conformance("best_fit")
test_eos_align = conformance("eos_align", {"max_document": 7})
test_length_buckets = conformance("length_buckets", {"documents": 5})
test_length_curriculum = conformance("length_curriculum", {"least": 2, "buffer": 9})


def test_no_plugin_is_left_out() -> None:
    ours = {
        entry.name
        for entry in entry_points(group="minillm.plugins")
        if entry.dist is not None and entry.dist.name == "minillm-data"
    }
    checked = {getattr(test, "checks_plugin", None) for test in globals().values()}
    assert ours <= checked
