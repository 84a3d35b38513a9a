"""Tests that plugins' kernels are selected, noted with a reason, or refused: never ignored silently."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minillm_core.backends.bind import (
    bind,
    kernel_answers,
    kernel_conflicts,
    kernel_notes,
    kernel_preflight,
    verdicts,
)
from minillm_core.backends.detect import Detected
from minillm_core.errors import BackendError
from minillm_core.ops.select import Candidate, Request, choose_all
from minillm_core.plugins.plugin import Plugin

CORE = (
    Candidate("swiglu", "composed", ("torch",), "m:f", plain=True),
    Candidate("rms_norm", "fused", ("torch",), "m:g"),
)
ASKED = tuple(Request(op, "torch", "cpu", "float32") for op in ("swiglu", "rms_norm"))


def offer(
    op: str, name: str = "quick", *, why: str | None = None, rank: int = 0, **more: Any
) -> Candidate:
    """Build a plugin's kernel; refused for ``why``."""
    accepts = {"accepts": lambda r: why, "rank": lambda r: rank}
    return Candidate(op, name, ("torch",), "p:f", **accepts, **more)


def notes(*offers: Candidate) -> tuple[str, ...]:
    """Return the notes on the plugin that provides these kernels."""
    choices = choose_all(ASKED, (*offers, *CORE))
    brought = [("trick", one) for one in offers]
    for conflict in kernel_conflicts(brought, CORE, ASKED, choices):
        assert conflict.owner == "trick"
        assert set(conflict.ops) <= {one.op for one in offers}
        raise conflict.error
    return kernel_notes(brought, ASKED, choices)


def test_one_that_serves_needs_no_word() -> None:
    assert notes(offer("swiglu")) == ()


def test_the_kernel_of_another_backend_needs_no_word_where_its_twin_serves() -> None:
    other = replace(offer("swiglu", "on_mlx"), backends=("mlx",))
    assert notes(offer("swiglu"), other) == ()
    with pytest.raises(BackendError) as refused:
        notes(other, replace(other, name="too"))
    assert (refused.value.fix or "").endswith("without it, swiglu by composed")


def test_one_that_does_not_serve_beside_one_that_does_is_noted() -> None:
    (note,) = notes(offer("swiglu"), offer("rms_norm", why="no CUDA here"))
    assert note == "kernel rms_norm=quick of plugin trick does not serve: no CUDA here"


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (offer("swiglu", why="no CUDA here"), "swiglu=quick: no CUDA here"),
        (offer("swiglu", rank=9), "swiglu=quick: composed does, preferred"),
        (offer("swigloo"), "swigloo=quick"),
        (offer("rms_norm", "fused"), "rms_norm=fused"),
    ],
)
def test_a_plugin_without_use_is_refused(kernel: Candidate, said: str) -> None:
    with pytest.raises(BackendError, match="plugin 'trick'") as refused:
        notes(kernel)
    assert said in (refused.value.where or "")


def test_one_for_an_op_that_no_part_computes_is_noted_and_refused_where_it_is_required() -> None:
    (note,) = notes(offer("swiglu"), offer("attention"))
    said = "no part of this plan computes the op"
    assert note == f"kernel attention=quick of plugin trick does not serve: {said}"
    with pytest.raises(BackendError, match="an op that this plan does not use"):
        notes(offer("swiglu"), offer("attention", disable_option="attention=false"))
    with pytest.raises(BackendError, match="can serve") as refused:
        notes(offer("attention"))
    assert refused.value.where == f"attention=quick: {said}"
    assert refused.value.fix == "leave the plugin out"


def test_a_plugin_without_use_hears_what_serves_and_how_it_could() -> None:
    with pytest.raises(BackendError, match="can serve") as refused:
        notes(offer("swiglu", why="no CUDA here"), offer("rms_norm", why="nor here"))
    fix = "leave the plugin out: without it, swiglu by composed, rms_norm by fused"
    assert refused.value.fix == fix
    with pytest.raises(BackendError, match="brings serves") as refused:
        notes(offer("swiglu", rank=9))
    assert (refused.value.fix or "").startswith("name one, as in --kernels swiglu=quick, or leave")


def test_one_that_is_insisted_on_serves_or_nothing_begins() -> None:
    assert notes(offer("swiglu", unless="swiglu=false")) == ()
    with pytest.raises(BackendError, match=r"must serve rms_norm.*no CUDA here") as refused:
        notes(offer("swiglu"), offer("rms_norm", why="no CUDA here", disable_option="norm=false"))
    assert "trick.norm=false leaves the op to 'fused'" in (refused.value.fix or "")


def test_the_way_out_is_no_option_where_the_plugin_would_have_no_use_then() -> None:
    for others in ((), (offer("swiglu", why="nor here"),), (offer("swiglu", rank=9),)):
        with pytest.raises(BackendError, match="must serve rms_norm") as refused:
            notes(*others, offer("rms_norm", why="no CUDA here", disable_option="norm=false"))
        assert (refused.value.fix or "").startswith("leave the plugin out: 'fused' serves instead")


@pytest.mark.parametrize(
    ("requirement", "said"),
    [
        ("pytest", None),
        ("pytest>=1", None),
        ("pytest<1", "needs pytest<1: here is"),
        (
            "no-such-thing>=2",
            "needs no-such-thing>=2: it is not installed (pip install 'no-such-thing>=2'",
        ),
    ],
)
def test_what_a_kernel_requires_is_looked_up(requirement: str, said: str | None) -> None:
    found = offer("swiglu", requires=("numpy", requirement)).refusal(ASKED[0])
    assert (found or "").startswith(said or "")
    assert (found is None) == (said is None)


def test_the_request_is_judged_before_the_installation() -> None:
    kernel = offer("swiglu", why="no CUDA here", requires=("no-such-thing",))
    assert kernel.refusal(ASKED[0]) == "no CUDA here"


class Norms(Plugin, api=1):
    """Provides a kernel for eager mode only."""

    disable_option: str = "norms=false"

    def kernel_provider(self, kernels: Any) -> None:
        kernels.candidate(
            Candidate(
                "rms_norm",
                "quick",
                ("torch",),
                "p:f",
                devices=("cuda",),
                accepts=lambda r: f"compiled {r.device}, {r.dtype}" if r.compiled else None,
                requires=("no-such-thing",),
                disable_option=self.disable_option,
            )
        )


def test_a_plan_alone_refuses_what_no_device_would_serve(plan_of: Any) -> None:
    with pytest.raises(BackendError, match=r"'norms' .* compiled cuda, bfloat16") as refused:
        kernel_preflight(plan_of({"norms": Norms()}))
    assert (refused.value.fix or "").startswith("leave the plugin out: 'fused' serves instead")
    kernel_preflight(plan_of({"norms": Norms()}, train_compile="off"))  # installed: checked later
    kernel_preflight(plan_of({"norms": Norms(disable_option="")}))


def test_a_plan_for_a_device_is_refused_as_a_run_there_would_be(plan_of: Any) -> None:
    """This does not depend on the installed packages."""
    there, norms = Detected("torch", "cuda", "test"), {"norms": Norms(disable_option="")}
    eager = {"train_compile": "off"}
    assert kernel_preflight(plan_of(norms, **eager), there) == ()
    assert kernel_preflight(plan_of(norms, kernels="rms_norm=quick", **eager), there) == ()
    for plan, said in (
        (plan_of(norms), "none of the kernels that plugin 'norms' brings can serve"),
        (plan_of(norms, kernels="reference", **eager), "norms' brings serves"),
        (plan_of(norms, kernels="strict"), "preferred kernel 'quick' cannot serve rms_norm"),
        (plan_of(norms, kernels="rms_norm=quick"), "'quick' cannot serve rms_norm: compiled cuda"),
        (plan_of(kernels="rms_norm=quick"), "no kernel 'quick' for rms_norm"),
        (plan_of(kernels="rmsnorm=fused"), "no op 'rmsnorm' in this plan"),
    ):
        with pytest.raises(BackendError, match=said):
            kernel_preflight(plan, there)


class Brings(Plugin, api=1):
    """Provides one kernel, which refuses."""

    op: str = "swiglu"
    because: str = "no"

    def kernel_provider(self, kernels: Any) -> None:
        kernels.candidate(offer(self.op, why=self.because, requires=("no-such-thing",)))


def clashes(plan: Any) -> dict[str, tuple[str, ...]]:
    """Return op -> the plugins that ``plugins why`` names as an obstacle to a run."""
    answers = kernel_answers(plan, Detected("torch", "cpu", "test"))
    return {one.also[0]: one.clashes[0].who for one in answers if one.clashes}


def test_why_names_the_plugin_and_the_ops_whatever_the_reason_says(plan_of: Any) -> None:
    reason = "only where rms_norm=fused, or linear=matmul"
    plan = plan_of({"trick": Brings(because=reason)})
    assert clashes(plan) == {"swiglu": ("trick",)}
    both = {"one": Brings(), "two": Brings(op="linear")}
    assert clashes(plan_of(both)) == {"linear": ("two",)}  # the first, as for a run


def test_why_and_a_run_give_the_same_refusal(plan_of: Any) -> None:
    here = Detected("torch", "cpu", "test")
    for plan in (
        plan_of({"trick": Brings()}),
        plan_of(kernels="swiglu=absent"),
        plan_of(kernels="atention=sdpa"),
    ):
        found = verdicts(plan, here)
        with pytest.raises(BackendError) as refused:
            bind(here, plan)
        with pytest.raises(BackendError) as again:
            found.choices()
        assert str(again.value) == str(refused.value)
    assert verdicts(plan_of(), here).choices() == bind(here, plan_of())[0].kernels


def test_the_deprecated_name_of_the_option_is_taken() -> None:
    old, new = offer("swiglu", unless="a=false"), offer("swiglu", disable_option="a=false")
    for kernel in (old, replace(old, requires=()), new):
        assert kernel.unless == kernel.disable_option == "a=false"
