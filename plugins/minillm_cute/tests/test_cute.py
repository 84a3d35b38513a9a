"""Tests of supported requests, of the reasons for others, and of errors before a run."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from minillm_core import (
    BackendError,
    LossForm,
    Plugin,
    PluginError,
    SigmoidCap,
    TanhCap,
    install,
)
from minillm_core.backends.bind import bind, kernel_preflight
from minillm_core.backends.detect import Detected
from minillm_core.config.load import load
from minillm_core.ops.contract import CONTRACTS
from minillm_core.ops.select import Candidate, Request
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin, check_support
from minillm_cute.cute import Cute
from minillm_data.source_weights import SourceWeights
from minillm_mix.forgetting_attn import ForgettingAttn
from minillm_modded.bigram_hash import BigramHash
from minillm_modded.windows import Windows
from minillm_muon.muon import Muon
from minillm_triton.triton import Triton

CUDA = Detected("torch", "cuda", "a test")
INSTALLED = {"flash-attn-4": "4.0.0b36", "quack-kernels": "0.6.5", "triton": "3.6.0"}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake an installation of the pinned versions, on a machine whose GPU is not known."""
    monkeypatch.setattr(install, "gpu_capabilities", tuple)
    real = install.installed_version
    monkeypatch.setattr(
        install, "installed_version", lambda name: INSTALLED.get(name) or real(name)
    )


def planned(*more: Plugin, kernels: str = "auto", settings: Any = (), **options: Any) -> Plan:
    config = load(
        preset="tiny",
        assignments=["train.dtype=bfloat16", "model.vocab=1280", *settings],
        flags={"--kernels": kernels},
        default_preset=lambda: ("tiny", "test"),
    ).config
    named = [*((type(p).__name__.lower(), p) for p in more), ("cute", Cute(**options))]
    return build_plan(config, [LoadedPlugin.of(name, plugin) for name, plugin in named])


def offers(**options: Any) -> dict[str, Candidate]:
    return {candidate.op: candidate for _, candidate in planned(**options).candidates}


def asked(op: str, facts: dict[str, Any] | None = None, **changes: Any) -> Request:
    known = {"backend": "torch", "device": "cuda", "dtype": "bfloat16", "compiled": True}
    return Request(op, **{**known, **changes}, facts=facts or {})


@pytest.mark.parametrize(
    ("op", "facts"),
    [
        ("attention", {}),
        ("attention", {"window": "static", "documents": True, "grouped": True, "head_dim": 128}),
        ("attention", {"window": None, "documents": False, "head_dim": 64, "length": 65_536}),
        ("linear_cross_entropy", {}),
        ("linear_cross_entropy", {"weights": "target", "vocab": 50_304, "width": 768}),
        ("linear_cross_entropy", {"form": LossForm(cap=TanhCap(30.0), scale=0.5)}),
        ("linear_cross_entropy", {"form": LossForm(cap=SigmoidCap(23.0, 5.0, 7.5))}),
    ],
)
@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_served(op: str, facts: dict[str, Any], compiled: bool) -> None:
    assert offers()[op].refusal(asked(op, facts, compiled=compiled)) is None


@pytest.mark.parametrize(
    ("op", "changes", "said"),
    [
        ("attention", {"dtype": "float32"}, "bfloat16 or float16, not in float32"),
        ("attention", {"facts": {"head_dim": 16}}, "its gradients are right, not 16"),
        ("attention", {"facts": {"head_dim": 192}}, "32, 64 or 128 features"),
        ("attention", {"facts": {"window": "dynamic"}}, "is computed on the GPU"),
        ("attention", {"facts": {"documents": True, "adjacent": False}}, "tokens are adjacent"),
        ("attention", {"device": "cpu"}, "serves cuda, not cpu"),
        ("attention", {"backend": "mlx", "device": "metal"}, "serves torch, not mlx"),
        ("linear_cross_entropy", {"dtype": "float16"}, "bfloat16, not in float16"),
        ("linear_cross_entropy", {"facts": {"targets": 3}}, "one target, not 3"),
        (
            "linear_cross_entropy",
            {"facts": {"form": LossForm(cap=TanhCap(15.0), smoothing=0.1, z=1e-4)}},
            "the form's smoothing, z",
        ),
        ("linear_cross_entropy", {"facts": {"form": LossForm(scale=0.5)}}, "the form's scale"),
        (
            "linear_cross_entropy",
            {"facts": {"form": LossForm(cap=SigmoidCap(80.0, 5.0, 7.5))}},
            "softcaps of at most 64, not 80",
        ),
        ("linear_cross_entropy", {"facts": {"weights": "position"}}, "weight per position"),
        ("linear_cross_entropy", {"facts": {"vocab": 50_257}}, "multiples of 128, not 50257"),
        ("linear_cross_entropy", {"facts": {"width": 100}}, "multiples of 8, not 100"),
    ],
)
def test_what_is_not_served_has_a_reason(op: str, changes: dict[str, Any], said: str) -> None:
    assert said in (offers()[op].refusal(asked(op, **changes)) or "")


@pytest.mark.parametrize(
    ("op", "distribution"),
    [("attention", "flash-attn-4"), ("linear_cross_entropy", "quack-kernels")],
)
@pytest.mark.parametrize(
    ("version", "said"), [("4.0.0b35", "here is 4.0.0b35"), (None, "it is not installed")]
)
def test_another_version_or_none_is_named(
    monkeypatch: pytest.MonkeyPatch, op: str, distribution: str, version: str | None, said: str
) -> None:
    monkeypatch.setattr(install, "installed_version", lambda name: version)
    reason = offers()[op].refusal(asked(op)) or ""
    assert said in reason
    assert distribution in reason


def chosen(plan: Plan) -> dict[str, str]:
    return {choice.op: choice.kernel for choice in bind(CUDA, plan)[0].kernels}


def test_both_kernels_are_preferred_to_those_of_the_core_and_of_triton() -> None:
    found = chosen(planned(Muon(), Triton(loss="auto")))
    assert found["attention"] == "fa4"
    assert found["linear_cross_entropy"] == "quack"


def test_windows_and_documents_are_served_and_a_window_that_changes_is_an_input_on_the_host() -> (
    None
):
    staged = Windows(start=128, window=384, stages=3, documents=True)
    plan = planned(staged, settings=["train.seq_len=512"])
    binding, _ = bind(CUDA, plan)
    assert {c.op: c.kernel for c in binding.kernels}["attention"] == "fa4"
    assert binding.inputs
    assert binding.host_masks
    others = planned(staged, settings=["train.seq_len=512"], kernels="attention=flex")
    binding, _ = bind(CUDA, others)
    assert binding.inputs
    assert not binding.host_masks


class Capped(Plugin, api=1):
    """A softcap."""

    def compute_loss(self, loss: Any) -> None:
        loss.logits(cap=TanhCap(15.0))


class Rescaled(Plugin, api=1):
    """A scale of the logits."""

    def compute_loss(self, loss: Any) -> None:
        loss.logits(scale=0.5)


def test_with_a_softcap_it_is_used_where_it_is_named() -> None:
    assert chosen(planned(Capped()))["linear_cross_entropy"] == "chunked"
    assert chosen(planned(Capped(), Triton(loss="auto")))["linear_cross_entropy"] == "triton"
    named = planned(Capped(), kernels="linear_cross_entropy=quack")
    assert chosen(named)["linear_cross_entropy"] == "quack"
    required = planned(Capped(), Muon(), Triton(loss="auto"), loss=True)
    assert chosen(required)["linear_cross_entropy"] == "quack"


def test_a_required_kernel_is_preferred_to_all_others() -> None:
    beside = (Capped(), Muon(), Triton(loss="auto"))
    assert chosen(planned(*beside))["gram"] == "triton"
    assert chosen(planned(*beside, gram=True))["gram"] == "quack"


def test_a_plugin_that_adds_no_weights_leaves_it_the_loss() -> None:
    assert chosen(planned(BigramHash()))["linear_cross_entropy"] == "quack"
    assert chosen(planned(SourceWeights()))["linear_cross_entropy"] == "chunked"


def test_a_loss_that_it_cannot_serve_is_left_to_others_with_a_note() -> None:
    binding, _ = bind(CUDA, planned(Rescaled()))
    (note,) = (note for note in binding.notes if "linear_cross_entropy=quack" in note)
    assert "does not know the form's scale" in note
    with pytest.raises(BackendError, match="the form's scale") as refused:
        kernel_preflight(planned(Rescaled(), loss=True))
    assert "cute.loss=false" in (refused.value.fix or "")


def test_attention_that_it_cannot_serve_is_refused_while_planning() -> None:
    settings = ["train.dtype=float32"]
    with pytest.raises(BackendError, match="bfloat16 or float16, not in float32"):
        kernel_preflight(planned(settings=settings), CUDA)


def test_beside_mixers_in_all_layers_the_attention_is_refused_or_noted() -> None:
    with pytest.raises(BackendError, match="an op that this plan does not use") as refused:
        kernel_preflight(planned(ForgettingAttn()))
    assert refused.value.fix == "cute.attention=false, or leave the plugin out"
    binding, _ = bind(CUDA, planned(ForgettingAttn(), attention="auto"))
    assert {c.op: c.kernel for c in binding.kernels}["linear_cross_entropy"] == "quack"
    (note,) = (note for note in binding.notes if "attention=fa4" in note)
    assert note.endswith("no part of this plan computes the op")


def test_what_is_switched_off_is_not_offered() -> None:
    assert set(offers(loss=False)) == {"attention", "gram"}
    assert set(offers(attention=False)) == {"gram", "linear_cross_entropy"}
    assert set(offers(gram=False)) == {"attention", "linear_cross_entropy"}


@pytest.mark.parametrize(("backend", "device"), [("mlx", "gpu"), ("torch", "cpu")])
def test_elsewhere_the_plugin_is_refused(backend: str, device: str) -> None:
    with pytest.raises(PluginError, match="'cute' does not run on"):
        check_support([LoadedPlugin.of("cute", Cute())], backend, device)


def test_candidates_name_functions_with_the_signatures_of_their_ops(kernels: Any) -> None:
    for op, candidate in offers().items():
        module, _, function = candidate.reference.rpartition(".")[2].partition(":")
        wanted = CONTRACTS[op].signature.parameters
        code = getattr(kernels(module), function).__code__
        named = code.co_argcount + code.co_kwonlyargcount
        assert code.co_varnames[:named] == tuple(wanted)


def test_planning_imports_no_framework_and_no_kernel() -> None:
    script = (
        "import sys; from minillm_cute.cute import Cute; Cute();"
        "print([m for m in ('torch', 'triton', 'flash_attn', 'quack', 'cutlass') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"
