"""Conformance tests of every plugin of this distribution, one test per check."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from minillm_kit import conformance

pytestmark = pytest.mark.slow

test_cautious_wd = conformance("cautious_wd")
test_muon = conformance("muon")
test_muon_in_shapes = conformance("muon", {"momentum_start": 0.85, "cooldown": 0.5})
test_normuon = conformance("normuon")
test_polar_express = conformance("polar_express")
test_role_lr = conformance("role_lr", {"embedding": 10, "betas": {"head": [0.5, 0.9]}})
test_head_muon = conformance("head_muon", pairs=2)
test_two_step_embed = conformance("two_step_embed", pairs=2)
test_muon_eq = conformance("muon_eq", pairs=2)
test_uw_floor = conformance("uw_floor", pairs=2)


def test_no_plugin_is_left_out() -> None:
    ours = {
        entry.name
        for entry in entry_points(group="minillm.plugins")
        if entry.dist is not None and entry.dist.name == "minillm-muon"
    }
    checked = {getattr(test, "checks_plugin", None) for test in globals().values()}
    assert ours <= checked
