"""Every plugin of this distribution under the contract kit, each check a test of its own."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from minillm_kit import conformance

pytestmark = pytest.mark.slow

test_tensorboard = conformance("tensorboard")
test_throttle = conformance("throttle", pairs=2)
test_trackio = conformance("trackio")
test_wandb = conformance("wandb")


def test_no_plugin_is_left_out() -> None:
    ours = {
        entry.name
        for entry in entry_points(group="minillm.plugins")
        if entry.dist is not None and entry.dist.name == "minillm-track"
    }
    checked = {getattr(test, "checks_plugin", None) for test in globals().values()}
    assert ours <= checked
