"""A small model, planned with plugins that a test has made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minillm_core.config.load import load
from minillm_core.config.schema import Config
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.plugin import Plugin

Planned = Callable[..., Plan]

SMALL = (
    "model.layers=4",
    "model.dim=32",
    "model.heads=4",
    "model.kv_heads=2",
    "model.hidden=48",
    "model.vocab=64",
    "model.tied=true",
    "train.rows=2",
    "train.seq_len=16",
)


@pytest.fixture(scope="session")
def small_config() -> Callable[..., Config]:
    """Settings of a small model, with those given as ``key=value``."""

    def make(*settings: str) -> Config:
        merged = dict(setting.split("=", 1) for setting in (*SMALL, *settings))
        loaded = load(
            preset="tiny",
            assignments=[f"{key}={value}" for key, value in merged.items()],
            default_preset=lambda: ("tiny", "test"),
        )
        return loaded.config

    return make


@pytest.fixture(scope="session")
def planned(small_config: Callable[..., Config]) -> Planned:
    """``planned("train.lr=0.1", gate=Gate())``: a plan, plugins by the names they get."""

    def make(*settings: str, **plugins: Plugin) -> Plan:
        loaded = [LoadedPlugin.of(name, plugin) for name, plugin in plugins.items()]
        return build_plan(small_config(*settings), loaded)

    return make
