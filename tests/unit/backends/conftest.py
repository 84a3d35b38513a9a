"""Fixture: a small plan, from settings and plugins defined in a test."""

from __future__ import annotations

from typing import Any

import pytest

from minillm_core.config.load import load
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin

SMALL = {
    **{"model.layers": 2, "model.dim": 16, "model.heads": 4, "model.kv_heads": 2},
    **{
        "model.hidden": 24,
        "model.vocab": 31,
        "model.tied": True,
        "train.rows": 2,
        "train.seq_len": 8,
    },
}


@pytest.fixture(scope="session")
def plan_of() -> Any:
    """Return ``plan_of({"name": plugin}, train_dtype="bfloat16")``: ``train_dtype`` is train.dtype."""

    def make(plugins: dict[str, Any] | None = None, **settings: Any) -> Plan:
        given = SMALL | {key.replace("_", ".", 1): value for key, value in settings.items()}
        loaded = load(
            preset="tiny",
            assignments=[f"{key}={str(value).lower()}" for key, value in given.items()],
            default_preset=lambda: ("tiny", "test"),
        )
        made = [LoadedPlugin.of(name, plugin) for name, plugin in (plugins or {}).items()]
        return build_plan(loaded.config, made)

    return make
