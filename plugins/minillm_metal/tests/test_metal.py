"""Tests of supported requests, of MLX's preferred kernels, and of errors elsewhere than on a Mac."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from minillm_core import BackendError, LossForm, Plugin, PluginError, SigmoidCap
from minillm_core.backends import bind as binding
from minillm_core.backends.detect import Detected
from minillm_core.config.load import load
from minillm_core.ops.contract import CONTRACTS
from minillm_core.ops.select import Candidate, Request
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin, check_support
from minillm_metal.metal import Metal

GPU = Detected("mlx", "gpu", "a test")


@pytest.fixture
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding.sys, "platform", "darwin")


def planned(*more: Plugin, kernels: str = "auto", **options: Any) -> Plan:
    config = load(
        preset="tiny", flags={"--kernels": kernels}, default_preset=lambda: ("tiny", "test")
    ).config
    named = [("metal", Metal(**options)), *((type(p).__name__.lower(), p) for p in more)]
    return build_plan(config, [LoadedPlugin.of(name, plugin) for name, plugin in named])


def offers(**options: Any) -> dict[str, Candidate]:
    return {one.op: one for _, one in planned(**options).candidates if one.name == "metal"}


def asked(op: str, **facts: Any) -> Request:
    return Request(op, "mlx", "metal", "bfloat16", True, facts)


class Capped(Plugin, api=1):
    """The records' softcap."""

    def compute_loss(self, loss: Any) -> None:
        loss.logits(cap=SigmoidCap(23.0, 5.0, 7.5))


class Windowed(Plugin, api=1):
    """A short window."""

    def build_attention(self, attn: Any) -> None:
        attn.window(16)


def chosen(plan: Plan) -> dict[str, str]:
    return {choice.op: choice.kernel for choice in binding.bind(GPU, plan)[0].kernels}


def test_capped_logits_and_windows_are_served(on_a_mac: None) -> None:
    kernels = chosen(planned(Capped(), Windowed()))
    assert {op for op, kernel in kernels.items() if kernel == "metal"} == {
        "linear_cross_entropy",
        "attention",
        "rms_norm",
    }


def test_where_mlx_moves_as_few_bytes_its_own_stay(on_a_mac: None) -> None:
    kernels = chosen(planned(Windowed()))
    assert (kernels["linear_cross_entropy"], kernels["attention"]) == ("fused", "metal")
    assert kernels["rotate"] == "fast"
    with pytest.raises(BackendError, match="plugin 'metal' brings"):
        binding.bind(GPU, planned(norm=False))
    for named in (
        chosen(planned(kernels="attention=metal,linear_cross_entropy=metal")),
        chosen(planned(attention=True, loss=True)),
    ):
        assert named["attention"] == named["linear_cross_entropy"] == "metal"


def test_large_logits_are_served_whatever_their_form() -> None:
    kernel = offers()["linear_cross_entropy"]
    for rows, rank in ((65_536, -2), (1_024, 1)):
        assert kernel.rank(asked(kernel.op, rows=rows, vocab=50_304)) == rank
    assert kernel.rank(asked(kernel.op, rows=8, vocab=64, form=LossForm(z=1e-4))) == -2


@pytest.mark.parametrize(
    ("op", "facts", "said"),
    [
        ("attention", {"head_dim": 20}, "multiple of 8 features, not 20"),
        ("attention", {"head_dim": 192}, "up to 128 features"),
        ("linear_cross_entropy", {"targets": 9}, "up to 8 targets"),
        ("linear_cross_entropy", {"vocab": 2**31}, "32 bits"),
    ],
)
def test_what_is_not_served_has_a_reason(op: str, facts: dict[str, Any], said: str) -> None:
    assert said in (offers()[op].refusal(asked(op, **facts)) or "")
    assert offers()[op].refusal(asked(op)) is None


def test_blocks_serve_other_heads_and_cards_where_there_is_something_to_mask() -> None:
    (blocks,) = (one for _, one in planned().candidates if one.name == "blocks")
    for device in ("metal", "cuda"):
        request = Request("attention", "mlx", device, "bfloat16", True, {"window": "static"})
        assert blocks.refusal(request) is None
    assert "plainly causal" in (blocks.refusal(asked("attention")) or "")
    short = asked("attention", documents=True, length=512)
    assert "1024 positions or more" in (blocks.refusal(short) or "")


ALSO_CUDA = {"linear_cross_entropy", "rotate", "rms_norm"}


@pytest.mark.parametrize(
    ("backend", "device", "said"),
    [("mlx", "cpu", "not cpu"), ("torch", "mps", "serves mlx, not torch")],
)
def test_elsewhere_candidates_say_so(backend: str, device: str, said: str) -> None:
    for candidate in offers().values():
        request = Request(candidate.op, backend, device, "float32")
        assert (candidate.refusal(request) or "").endswith(said)


def test_kernels_without_products_of_matrices_also_run_as_cuda() -> None:
    for op, candidate in offers().items():
        request = Request(op, "mlx", "cuda", "bfloat16", True)
        refused = None if op in ALSO_CUDA else "serves metal, not cuda"
        assert candidate.refusal(request) == refused
    ranks = {
        device: offers()["rms_norm"].rank(Request("rms_norm", "mlx", device, "bfloat16"))
        for device in ("metal", "cuda")
    }
    assert ranks == {"metal": -1, "cuda": 1}


@pytest.mark.parametrize(("backend", "device"), [("torch", "cuda"), ("mlx", "cpu")])
def test_elsewhere_the_plugin_is_refused(backend: str, device: str) -> None:
    with pytest.raises(PluginError, match="'metal' does not run on"):
        check_support([LoadedPlugin.of("metal", Metal())], backend, device)


def test_options_insist_or_leave_out() -> None:
    assert set(offers(loss=False)) == {"attention", "gram", "rms_norm", "rotate"}
    insisting = {op: one.disable_option for op, one in offers(loss=True).items()}
    assert insisting == {
        "linear_cross_entropy": "loss=false",
        "attention": "",
        "rotate": "",
        "rms_norm": "",
        "gram": "",
    }


def test_candidates_name_functions_with_the_signatures_of_their_ops() -> None:
    pytest.importorskip("mlx.core")
    for op, candidate in offers().items():
        code = candidate.load().__code__
        wanted = tuple(CONTRACTS[op].signature.parameters)
        assert code.co_varnames[: len(wanted)] == wanted


def test_planning_imports_neither_mlx_nor_torch() -> None:
    script = (
        "import sys; from minillm_metal.metal import Metal; Metal();"
        "print([m for m in ('mlx.core', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"
