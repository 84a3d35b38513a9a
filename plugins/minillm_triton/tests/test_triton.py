"""Tests of supported requests, of the reasons for others, and of errors before a run."""

from __future__ import annotations

from typing import Any

import pytest

from minillm_core import BackendError, LossForm, PlanError, Plugin, SigmoidCap, install
from minillm_core.backends.bind import bind
from minillm_core.backends.detect import Detected
from minillm_core.config.load import load
from minillm_core.ops.select import Candidate, Request
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_kit.kernels.check import facts_of
from minillm_kit.kernels.examples import CASES
from minillm_triton.fp8_head import Fp8Head, accepts_fp8
from minillm_triton.triton import Triton

CUDA = Detected("torch", "cuda", "a test")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake an installation of Triton, on a machine whose GPU is not known."""
    monkeypatch.setattr(install, "gpu_capabilities", tuple)
    real = install.installed_version
    monkeypatch.setattr(
        install, "installed_version", lambda name: "3.6.0" if name == "triton" else real(name)
    )


class Ahead(Plugin, api=1):
    """Adds many further targets."""

    def compute_loss(self, loss: Any) -> None:
        for offset in range(2, 10):
            loss.target(0.5, offset=offset)


def planned(*more: Plugin, muon: Plugin | None = None, **options: Any) -> Plan:
    config = load(preset="tiny", default_preset=lambda: ("tiny", "test")).config
    named = [("triton", Triton(**options)), *(("ahead", plugin) for plugin in more)]
    named += [("muon", muon)] if muon is not None else []
    return build_plan(config, [LoadedPlugin.of(name, plugin) for name, plugin in named])


def offers(**options: Any) -> dict[str, Candidate]:
    return {candidate.op: candidate for _, candidate in planned(**options).candidates}


def refusal(**changes: Any) -> str | None:
    facts = {"targets": 1, "form": LossForm(), "weights": None, **changes.pop("facts", {})}
    known = {"backend": "torch", "device": "cuda", "dtype": "bfloat16", "compiled": True, **changes}
    request = Request("linear_cross_entropy", **known, facts=facts)
    return offers()["linear_cross_entropy"].refusal(request)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"form": LossForm(cap=SigmoidCap(23.0, 5.0, 7.5), scale=0.5, smoothing=0.1, z=1e-4)},
        {"weights": "position", "targets": 8},
    ],
)
@pytest.mark.parametrize("compiled", [True, False])
def test_the_loss_is_served(facts: dict[str, Any], compiled: bool) -> None:
    assert refusal(facts=facts, compiled=compiled) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"facts": {"targets": 9}}, "8 targets at most, not 9"),
        ({"dtype": "float16"}, "gradient of the logits in float16, where it can overflow"),
        ({"device": "cpu"}, "serves cuda, not cpu"),
        ({"backend": "mlx", "device": "metal"}, "serves torch, not mlx"),
    ],
)
def test_what_the_loss_does_not_serve_has_a_reason(changes: dict[str, Any], said: str) -> None:
    assert said in (refusal(**changes) or "")


def test_it_is_preferred_on_a_gpu() -> None:
    chosen = {choice.op: choice.kernel for choice in bind(CUDA, planned())[0].kernels}
    assert (chosen["linear_cross_entropy"], chosen["gram"]) == ("triton", "matmul")


def test_symmetric_products_are_served_where_there_are_some() -> None:
    pytest.importorskip("minillm_muon")
    from minillm_muon.muon import Muon

    binding, _ = bind(CUDA, planned(Ahead(), muon=Muon(), loss="auto"))
    chosen = {choice.op: choice.kernel for choice in binding.kernels}
    assert chosen["linear_cross_entropy"] != "triton"
    assert chosen["gram"] == "triton"


def test_what_is_insisted_on_and_cannot_be_had_is_refused() -> None:
    with pytest.raises(BackendError, match="8 targets at most, not 9") as caught:
        bind(CUDA, planned(Ahead()))
    assert "leave the plugin out: 'chunked' serves instead" in str(caught.value)
    with pytest.raises(BackendError, match="none of the kernels that plugin 'triton' brings"):
        bind(CUDA, planned(Ahead(), loss="auto"))  # AdamW has no matrix products either
    assert "linear_cross_entropy" not in offers(loss=False)
    with pytest.raises(PlanError, match="put nothing into the plan"):
        planned(loss=False, gram=False)


def test_fp8_serves_where_its_plugin_is_named_and_before_the_others() -> None:
    config = load(preset="tiny", default_preset=lambda: ("tiny", "test")).config
    both = [("fp8_head", Fp8Head()), ("triton", Triton())]
    plan = build_plan(config, [LoadedPlugin.of(name, plugin) for name, plugin in both])
    with pytest.raises(BackendError, match="none of the kernels that plugin 'triton' brings"):
        bind(CUDA, plan)  # AdamW has no matrix products, and the loss uses fp8
    alone = build_plan(config, [LoadedPlugin.of("fp8_head", Fp8Head())])
    chosen = {choice.op: choice.kernel for choice in bind(CUDA, alone)[0].kernels}
    assert chosen["linear_cross_entropy"] == "fp8"


@pytest.mark.parametrize(
    ("dtype", "facts", "said"),
    [
        ("bfloat16", {"width": 768, "vocab": 50_304}, None),
        ("float32", {}, "rounds from bfloat16, not from float32"),
        ("bfloat16", {"width": 60}, "multiples of 16 alone, not model.dim=60"),
        ("bfloat16", {"vocab": 50_257}, "not model.vocab=50257"),
        ("bfloat16", {"targets": 9}, "8 targets at most, not 9"),
    ],
)
def test_what_fp8_does_not_serve_has_a_reason(
    dtype: str, facts: dict[str, Any], said: str | None
) -> None:
    found = accepts_fp8(Request("linear_cross_entropy", "torch", "cuda", dtype, True, facts))
    assert found == said if said is None else said in (found or "")


def test_fp8_serves_a_case_of_kernels_check() -> None:
    requests = (
        Request("linear_cross_entropy", "torch", "cuda", "bfloat16", facts=facts_of(case))
        for case in CASES["linear_cross_entropy"]
    )
    assert any(accepts_fp8(request) is None for request in requests)
