"""Tests of the settings that two plans must share to use one compiled step."""

from __future__ import annotations

import pytest

from minillm_core.config.load import load
from minillm_core.plan import build_plan
from minillm_core.plugins.manager import load as load_plugins
from minillm_lab.study import graph_of


def graph(plugins: str = "", *settings: str) -> str:
    loaded = load(
        assignments=settings, plugins=plugins or None, default_preset=lambda: ("tiny", "test")
    )
    return graph_of(build_plan(loaded.config, load_plugins(loaded.specs, loaded.config.plugins)))


@pytest.mark.parametrize(
    "settings",
    [("train.lr=0.5",), ("train.steps=7",), ("train.schedule=wsd",), ("seed=3",), ("data.seed=1",)],
)
def test_numbers_that_a_step_gets_as_inputs_share_it(settings: tuple[str, ...]) -> None:
    assert graph("", *settings) == graph()


@pytest.mark.parametrize(
    "settings",
    [("train.rows=3",), ("train.seq_len=17",), ("model.dim=64",), ("train.checkpointing=true",)],
)
def test_sizes_do_not(settings: tuple[str, ...]) -> None:
    assert graph("", *settings) != graph()


def test_a_plugin_that_brings_kernels_alone_has_a_step_of_its_own() -> None:
    pytest.importorskip("minillm_liger")
    plain, liger, less = graph(), graph("liger"), graph("liger", "liger.loss=false")
    assert len({plain, liger, less}) == 3


def test_rates_of_a_rule_are_inputs_and_its_iterations_are_not() -> None:
    pytest.importorskip("minillm_muon")
    assert graph("muon", "muon.lr=0.5") == graph("muon") != graph()
    assert graph("muon", "muon.steps=3") != graph("muon")
