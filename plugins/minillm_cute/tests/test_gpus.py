"""Tests of the choice by the GPU's compute capability: on another GPU than a Hopper no kernel is taken."""

from __future__ import annotations

from typing import Any

import pytest

from minillm_core import BackendError, Plugin, PluginError, Request, install
from minillm_core.backends.bind import bind, kernel_answers, kernel_preflight
from minillm_core.backends.detect import Detected
from minillm_core.config.load import load
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin, check_support
from minillm_core.train.restore import inference_plan
from minillm_cute.cute import FLASH, QUACK, Cute
from minillm_cute.fused_relu2 import FusedReLU2
from minillm_cute.fused_swiglu import FusedSwiGLU
from minillm_kit.kernels.listing import listing
from minillm_kit.kernels.offers import Offer

CUDA = Detected("torch", "cuda", "a test")
PINNED = dict(one.split("==") for one in (FLASH, QUACK))
OPS = ("attention", "gram", "linear_cross_entropy")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake an installation of the pinned versions."""
    real = install.installed_version
    monkeypatch.setattr(install, "installed_version", lambda name: PINNED.get(name) or real(name))


def of(monkeypatch: pytest.MonkeyPatch, *found: tuple[int, int]) -> None:
    """Have the driver show GPUs of these capabilities."""
    monkeypatch.setattr(install, "gpu_capabilities", lambda: found)


def planned(name: str, plugin: Plugin, *, kernels: str = "auto") -> Plan:
    config = load(
        preset="tiny",
        assignments=["train.dtype=bfloat16", "model.vocab=1280"],
        flags={"--kernels": kernels},
        default_preset=lambda: ("tiny", "test"),
    ).config
    return build_plan(config, [LoadedPlugin.of(name, plugin)])


def cute(*, kernels: str = "auto", **options: Any) -> Plan:
    return planned("cute", Cute(**options), kernels=kernels)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((), None),  # as for a plan without a GPU
        (((0, 0),), None),  # a driver that does not say
        (((9, 0),), None),
        (((8, 6), (9, 0)), None),  # the run may be on either
        (((8, 0),), "capability 9.0, and this machine has 8.0"),
        (((8, 9), (8, 6), (8, 9)), "this machine has 8.6, 8.9"),
        (((10, 0),), "this machine has 10.0"),
        (((12, 0),), "this machine has 12.0"),
    ],
)
def test_a_kernel_serves_on_a_hopper_alone(
    monkeypatch: pytest.MonkeyPatch, op: str, found: tuple[tuple[int, int], ...], said: str | None
) -> None:
    of(monkeypatch, *found)
    candidate = {c.op: c for _, c in cute().candidates}[op]
    reason = candidate.refusal(Request(op, "torch", "cuda", "bfloat16", compiled=True))
    assert reason is None if said is None else said in (reason or "")


def test_a_required_kernel_is_refused_before_the_run_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of(monkeypatch, (8, 0))
    plan = cute(attention="auto", loss=True)
    for refuse in (lambda: bind(CUDA, plan), lambda: kernel_preflight(plan, CUDA)):
        with pytest.raises(
            BackendError, match=r"capability 9\.0, and this machine has 8\.0"
        ) as refused:
            refuse()
        assert "plugin 'cute' must serve linear_cross_entropy" in refused.value.what
        assert refused.value.where == "linear_cross_entropy=quack"
        assert "leave the plugin out: 'chunked' serves instead" in (refused.value.fix or "")
    with pytest.raises(BackendError, match="plugin 'cute' must serve attention"):
        bind(CUDA, cute())


def test_a_kernel_that_is_named_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    of(monkeypatch, (8, 9))
    with pytest.raises(BackendError, match=r"'quack' cannot serve .* has 8\.9") as refused:
        bind(CUDA, cute(attention="auto", kernels="linear_cross_entropy=quack"))
    assert refused.value.where == "--kernels linear_cross_entropy=quack"
    assert "chunked" in (refused.value.fix or "")


def test_with_auto_each_kernel_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    of(monkeypatch, (8, 0))
    plan = cute(attention="auto")
    with pytest.raises(BackendError, match="that plugin 'cute' brings can serve") as refused:
        bind(CUDA, plan)
    assert "attention=fa4: needs a GPU of compute capability 9.0" in (refused.value.where or "")
    assert "without it, attention by" in (refused.value.fix or "")
    offers = [Offer(candidate, "cute") for _, candidate in plan.candidates]
    listed = {one.offer.candidate.op: one for one in listing(plan, CUDA, offers).kernels}
    reports = {one.slot: one for one in kernel_answers(plan, CUDA)}
    for op in ("attention", "linear_cross_entropy"):
        assert listed[op].state == "cannot"
        assert listed[op].words.startswith("needs a GPU of compute capability 9.0")
        assert any("capability 9.0" in one.what for one in reports[f"kernel[{op}]"].refused)


def test_a_run_is_read_there_by_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    of(monkeypatch, (8, 0))
    said: list[str] = []
    plan = inference_plan(cute(loss=True), CUDA, said.append)
    kernels = {choice.op: choice.kernel for choice in bind(CUDA, plan)[0].kernels}
    assert kernels["linear_cross_entropy"] == "chunked"
    (line,) = said
    assert "attention=fa4 does not serve here" in line
    assert "capability 9.0" in line


@pytest.mark.parametrize(
    ("name", "plugin"), [("fused_relu2", FusedReLU2), ("fused_swiglu", FusedSwiGLU)]
)
def test_the_mlps_are_refused_before_the_run_and_read_there(
    monkeypatch: pytest.MonkeyPatch, name: str, plugin: type[Plugin]
) -> None:
    monkeypatch.setitem(PINNED, "quack-kernels", "0.6.5")
    loaded = LoadedPlugin.of(name, plugin())
    for found in ((), ((9, 0),), ((8, 0), (9, 0))):
        of(monkeypatch, *found)
        check_support([loaded], "torch", "cuda:0")
    of(monkeypatch, (8, 0))
    words = r"needs a GPU of compute capability 9\.0, and this machine has 8\.0"
    with pytest.raises(PluginError, match=words) as refused:
        check_support([loaded], "torch", "cuda:0")
    assert refused.value.fix == "leave it out"
    said: list[str] = []
    bind(CUDA, inference_plan(planned(name, plugin()), CUDA, said.append))
    (line,) = said
    assert "this machine has 8.0; the run is read without its kernels" in line
