"""Kernels that plugins bring are chosen, noted with a reason, or refused: never passed over."""

from __future__ import annotations

import pytest

from minillm_core.backends.offers import check_offers
from minillm_core.errors import BackendError
from minillm_core.ops.select import Candidate, Request, choose_all

CORE = (
    Candidate("swiglu", "composed", ("torch",), "m:f", plain=True),
    Candidate("rms_norm", "fused", ("torch",), "m:g"),
)
ASKED = tuple(Request(op, "torch", "cpu", "float32") for op in ("swiglu", "rms_norm"))


def offer(op: str, name: str = "quick", *, why: str | None = None, rank: int = 0) -> Candidate:
    """A plugin's kernel; refused for ``why``."""
    return Candidate(op, name, ("torch",), "p:f", accepts=lambda r: why, rank=lambda r: rank)


def notes(*offers: Candidate) -> tuple[str, ...]:
    """What is said of the plugin that brings these."""
    choices = choose_all(ASKED, (*offers, *CORE))
    return check_offers([("trick", one) for one in offers], CORE, ASKED, choices)


def test_one_that_serves_needs_no_word() -> None:
    assert notes(offer("swiglu")) == ()


def test_one_that_does_not_serve_beside_one_that_does_is_noted() -> None:
    (note,) = notes(offer("swiglu"), offer("rms_norm", why="no CUDA here"))
    assert note == "kernel rms_norm=quick of plugin trick does not serve: no CUDA here"


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (offer("swiglu", why="no CUDA here"), "swiglu=quick: no CUDA here"),
        (offer("swiglu", rank=9), "composed is preferred or was named"),
        (offer("swigloo"), "swigloo=quick"),
        (offer("rms_norm", "fused"), "rms_norm=fused"),
    ],
)
def test_a_plugin_without_use_is_refused(kernel: Candidate, said: str) -> None:
    with pytest.raises(BackendError, match="plugin 'trick'") as refused:
        notes(kernel)
    assert said in (refused.value.where or "")
