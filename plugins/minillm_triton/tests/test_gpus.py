"""Tests of the choice by the GPU's compute capability: kernels in fp8 are not taken before 8.9."""

from __future__ import annotations

import pytest

from minillm_core import BackendError, Plugin, PluginError, install
from minillm_core.backends.bind import bind, kernel_preflight
from minillm_core.backends.detect import Detected
from minillm_core.config.load import load
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin, check_support
from minillm_core.train.restore import inference_plan
from minillm_triton.fp8_head import Fp8Head
from minillm_triton.fp8_mlp import Fp8MLP
from minillm_triton.triton import Triton

CUDA = Detected("torch", "cuda", "a test")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake an installation of Triton."""
    real = install.installed_version
    monkeypatch.setattr(
        install, "installed_version", lambda name: "3.6.0" if name == "triton" else real(name)
    )


def of(monkeypatch: pytest.MonkeyPatch, *found: tuple[int, int]) -> None:
    """Have the driver show GPUs of these capabilities."""
    monkeypatch.setattr(install, "gpu_capabilities", lambda: found)


def planned(name: str, plugin: Plugin) -> Plan:
    config = load(
        preset="tiny",
        assignments=["train.dtype=bfloat16"],
        default_preset=lambda: ("tiny", "test"),
    ).config
    return build_plan(config, [LoadedPlugin.of(name, plugin)])


def loss_of(plan: Plan) -> str:
    kernels = {choice.op: choice.kernel for choice in bind(CUDA, plan)[0].kernels}
    return kernels["linear_cross_entropy"]


@pytest.mark.parametrize(
    "found", [(), ((8, 9),), ((9, 0),), ((10, 0),), ((12, 0),), ((8, 0), (9, 0))]
)
def test_the_head_in_fp8_serves_from_ada_on(
    monkeypatch: pytest.MonkeyPatch, found: tuple[tuple[int, int], ...]
) -> None:
    of(monkeypatch, *found)
    assert loss_of(planned("fp8_head", Fp8Head())) == "fp8"


def test_the_head_in_fp8_is_refused_on_older_gpus_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of(monkeypatch, (8, 6), (8, 0))
    plan = planned("fp8_head", Fp8Head())
    for refuse in (lambda: bind(CUDA, plan), lambda: kernel_preflight(plan, CUDA)):
        with pytest.raises(BackendError, match=r"8\.9 or later, and .* has 8\.0, 8\.6") as refused:
            refuse()
        assert refused.value.where == "linear_cross_entropy=fp8"
        assert "leave the plugin out: 'chunked' serves instead" in (refused.value.fix or "")
    said: list[str] = []
    assert loss_of(inference_plan(plan, CUDA, said.append)) == "chunked"
    assert "linear_cross_entropy=fp8 does not serve here" in said[0]


def test_kernels_without_fp8_serve_on_older_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    of(monkeypatch, (8, 0))
    assert loss_of(planned("triton", Triton())) == "triton"


def test_the_mlp_in_fp8_is_refused_on_older_gpus_before_the_run_and_read_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = LoadedPlugin.of("fp8_mlp", Fp8MLP())
    for found in ((), ((8, 9),), ((8, 0), (9, 0))):
        of(monkeypatch, *found)
        check_support([loaded], "torch", "cuda:0")
    of(monkeypatch, (8, 6), (8, 0))
    with pytest.raises(PluginError, match=r"8\.9 or later, and this machine has 8\.0, 8\.6"):
        check_support([loaded], "torch", "cuda:0")
    said: list[str] = []
    bind(CUDA, inference_plan(planned("fp8_mlp", Fp8MLP()), CUDA, said.append))
    (line,) = said
    assert "the run is read without its kernels" in line
