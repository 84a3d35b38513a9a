"""Tests of the doctor's findings on torch and MLX, from the facts that they report."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from minillm_core.backends.detect import InstalledFramework, Machine
from minillm_lab.doctor.finding import Finding, can_run
from minillm_lab.doctor.frameworks import Examined, examine, framework_findings, nvidia_finding
from minillm_lab.doctor.machine import Nvidia

TORCH = {"version": "2.13.0+cpu", "cuda": None, "devices": [], "mps": False, "warnings": []}
MLX = {"version": "0.32.4", "gpu": None, "device": "cpu", "gflops": 120.0, "blas": "openblas"}
CARD = {"name": "H100", "capability": "9.0", "bytes": 1}
H100 = Nvidia(("H100",), "580.95")


def look(
    torch: dict[str, Any] | str | None = None,
    mlx: dict[str, Any] | str | None = None,
    nvidia: Nvidia | None = None,
    broken: str | None = None,
    apple: bool = False,
) -> dict[str, list[Finding]]:
    """Return the findings by framework; a text is the reason of a failure, None: not installed."""
    said = {"torch": torch, "mlx": mlx}
    examined = {
        name: Examined(failed=one) if isinstance(one, str) else Examined(one)
        for name, one in said.items()
        if one is not None
    }
    versions = {"torch": "2.13.0+cpu", "mlx": "0.32.4"}
    installed: dict[str, Any] = {
        name: InstalledFramework(version, broken=broken if name == "mlx" else None)
        for name, version in versions.items()
        if said[name] is not None
    }
    findings = list(framework_findings(Machine(apple, **installed), examined, nvidia or Nvidia()))
    return {name: [one for one in findings if one.part == name] for name in said}


def test_both_work() -> None:
    found = look(TORCH, MLX)
    assert [one.state for ones in found.values() for one in ones] == ["ok", "ok"]
    assert "openblas" in found["mlx"][0].what


def test_neither_is_broken_and_one_alone_is_not() -> None:
    nothing = look()
    assert [one.state for ones in nothing.values() for one in ones] == ["broken", "broken"]
    (torch,), (mlx,) = look(TORCH).values()
    assert (torch.state, mlx.state) == ("ok", "missing")
    assert mlx.command == "pip install 'minillm-core[mlx]' torch===2.13.0+cpu"


@pytest.mark.parametrize("mlx", [MLX, None])
def test_one_that_does_not_work_is_named_with_its_reason(mlx: dict[str, Any] | None) -> None:
    (torch,) = look("ImportError: libtorch.so", mlx)["torch"]
    assert torch.state == ("warning" if mlx else "broken")
    assert "2.13.0+cpu is installed and does not work: ImportError: libtorch.so" in torch.what
    assert "install --force-reinstall --no-deps torch==2.13.0+cpu" in str(torch.command)


def test_mlx_without_its_library_gets_that_of_its_version() -> None:
    (mlx,) = look(TORCH, "ImportError", broken="its library libmlx is missing")["mlx"]
    assert "libmlx is missing" in mlx.what
    assert mlx.command == "pip install 'minillm-core[mlx]' torch===2.13.0+cpu mlx===0.32.4"


@pytest.mark.parametrize(
    ("driver", "build"), [("580.95", "cu130"), ("550.1", "cu126"), ("470.2", "cu126")]
)
def test_a_torch_without_cuda_beside_a_card(driver: str, build: str) -> None:
    (torch,) = look(TORCH, MLX, Nvidia(("H100",), driver))["torch"]
    assert torch.state == "warning"
    assert "of no use" in torch.what
    assert torch.command == (
        f"pip install torch==2.13.0+{build} mlx===0.32.4 "
        f"-i https://download.pytorch.org/whl/{build}"
    )


def test_a_driver_too_old_for_this_torch() -> None:
    cuda = TORCH | {"cuda": "13.0"}
    (torch,) = look(cuda, None, Nvidia(("H100",), "550.1"))["torch"]
    assert "needs driver 580 or newer, here is 550.1" in torch.what
    assert "+cu126" in str(torch.command)
    (torch,) = look(cuda | {"warnings": ["CUDA error 802"]}, None, H100)["torch"]
    assert (torch.state, "CUDA error 802" in torch.what) == ("warning", True)


def test_cards_that_work_and_one_that_does_not() -> None:
    devices = [CARD, CARD | {"name": "K80", "capability": "3.7", "error": "no kernel image"}]
    good, bad = look(TORCH | {"cuda": "13.0", "devices": devices}, None, H100)["torch"]
    assert good.state == "ok"
    assert "H100 (sm_90), K80 (sm_37)" in good.what
    assert (bad.state, "no kernel image" in bad.what) == ("warning", True)


def test_bfloat16_is_recommended_to_a_cpu_that_multiplies_it_faster() -> None:
    _, faster = look(TORCH | {"bfloat16": 4.04})["torch"]
    assert (faster.state, "4.0 times as fast in bfloat16" in faster.what) == ("optional", True)
    assert str(faster.command).endswith("train.dtype=bfloat16")
    for gain in (0.1, 1.9, None):  # None: there is a GPU
        assert len(look(TORCH | {"bfloat16": gain})["torch"]) == 1


@pytest.mark.parametrize(
    ("facts", "apple", "state", "words"),
    [
        ({"gflops": 4.5, "blas": None}, False, "warning", "25 times as slow"),
        ({"gflops": 90.0, "blas": None}, False, "ok", "90 GFLOP/s"),
        ({"gpu": "cuda", "device": "H100", "gflops": 4.5, "blas": None}, False, "ok", "cuda: H100"),
        ({"gpu": "metal", "device": "Apple M4"}, True, "ok", "metal: Apple M4"),
        ({"gpu": None}, True, "warning", "Metal does not answer"),
    ],
)
def test_mlx(facts: dict[str, Any], apple: bool, state: str, words: str) -> None:
    (mlx,) = look(TORCH, MLX | facts, apple=apple)["mlx"]
    assert (mlx.state, words in mlx.what) == (state, True)
    assert ("LD_PRELOAD" in str(mlx.command)) == ("BLAS" in mlx.what)


def test_a_card_without_a_driver_is_a_warning() -> None:
    assert nvidia_finding(Nvidia()).state == "ok"
    assert nvidia_finding(H100).state == "ok"
    found = nvidia_finding(Nvidia(("an NVIDIA GPU",)))
    assert (found.state, can_run([found])) == ("warning", True)


@pytest.mark.parametrize(
    ("script", "failed"),
    [
        ("import os; os.abort()", "it crashed: SIGABRT"),
        ("raise ImportError('no libtorch')", "ImportError: no libtorch"),
        ("print('hello')", "what it said cannot be read"),
        ("raise SystemExit(3)", "it said nothing"),
    ],
)
def test_one_that_fails_does_so_alone(script: str, failed: str) -> None:
    assert examine("torch", command=[sys.executable, "-c", script]) == Examined(failed=failed)


def test_one_that_hangs_is_ended() -> None:
    forever = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert "within 0.5 s" in str(examine("torch", 0.5, forever).failed)
    assert examine("torch", command=["/no/such/program"]).failed


def test_what_is_said_before_the_facts_is_passed_over() -> None:
    greets = [sys.executable, "-c", 'print(\'welcome\\n{"version": "1"}\')']
    assert examine("torch", command=greets).facts == {"version": "1"}


@pytest.mark.parametrize("name", [pytest.param("torch", marks=pytest.mark.slow), "mlx"])
def test_a_framework_says_what_is_asked(name: str) -> None:
    pytest.importorskip({"mlx": "mlx.core"}.get(name, name))
    said = examine(name)
    assert said.failed is None
    assert set({"torch": TORCH, "mlx": MLX}[name]) - {"gflops", "blas"} <= set(said.facts)
    facts: dict[str, Any] = {"torch": None, "mlx": None, name: dict(said.facts)}
    (found, *_) = look(**facts)[name]
    assert found.state in ("ok", "warning")
