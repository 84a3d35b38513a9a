"""Tests that changes of a framework's per-process state are detected."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    state, device = torch.get_rng_state(), mx.default_device()
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_rng_state(state)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    mx.set_default_device(device)


def changed(backend: str, change: Any) -> set[str]:
    half = import_module(f"minillm_kit.on_{backend}")
    before = half.process_state()
    change()
    after = half.process_state()
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda: None, set()),
        (lambda: torch.set_default_dtype(torch.float64), {"torch's default dtype"}),
        (lambda: torch.rand(1), {"torch's generator"}),
        (lambda: torch.manual_seed(12345), {"torch's seed", "torch's generator"}),
        (
            lambda: torch.use_deterministic_algorithms(True),
            {"torch.use_deterministic_algorithms"},
        ),
        (
            lambda: setattr(torch.backends.cudnn, "benchmark", True),
            {"torch.backends.cudnn.benchmark"},
        ),
    ],
)
def test_torch(change: Any, names: set[str]) -> None:
    assert changed("torch", change) == names


def test_mlx() -> None:
    assert not changed("mlx", lambda: None)
    assert changed("mlx", lambda: mx.random.seed(12345)) == {"mlx's generator"}
