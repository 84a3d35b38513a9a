"""Conformance tests of every plugin of this distribution, one test per check."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from minillm_kit import conformance

pytestmark = pytest.mark.slow

test_early_stop = conformance("early_stop", pairs=2)
test_adafactor = conformance("adafactor", pairs=2)
test_adam8bit = conformance("adam8bit", pairs=2)
test_ademamix = conformance("ademamix", pairs=2)
test_agc = conformance("agc", pairs=2)
test_cautious_adam = conformance("cautious_adam", pairs=2)
test_lion = conformance("lion", pairs=2)
test_ema = conformance("ema", pairs=2)
test_schedule_free = conformance("schedule_free", pairs=2)
test_swa = conformance("swa", pairs=2)
test_mars = conformance("mars", pairs=2)
test_shampoo = conformance("shampoo", {"iterations": 4}, pairs=2)
test_soap = conformance("soap", pairs=2)
test_snoo = conformance("snoo", {"every": 1}, pairs=2)
test_soap_muon = conformance("soap_muon", {"every": 1}, pairs=2)
test_power_cooldown = conformance("power_cooldown", pairs=2)
test_infinite_lr = conformance("infinite_lr", pairs=2)
test_galore = conformance("galore", {"rank": 4, "iterations": 1, "every": 1}, pairs=2)
test_freeze = conformance("freeze", pairs=2)
test_embed_grad_shrink = conformance("embed_grad_shrink", pairs=2)
test_ema_nesterov = conformance("ema_nesterov", pairs=2)
test_layer_clip = conformance("layer_clip", pairs=2)


def test_no_plugin_is_left_out() -> None:
    ours = {
        entry.name
        for entry in entry_points(group="minillm.plugins")
        if entry.dist is not None and entry.dist.name == "minillm-optim"
    }
    checked = {getattr(test, "checks_plugin", None) for test in globals().values()}
    assert ours <= checked
