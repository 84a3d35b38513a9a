"""Tests of the check of a plugin's kernels: selection, and reports of unsupported or wrong kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minillm_kit import CHECKS, Outcome
from minillm_kit.subject import Subject

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

KERNEL = """
from minillm_core import Candidate, Plugin


class Fast(Plugin, api=1):
    \"\"\"A kernel.\"\"\"

    def kernel_provider(self, kernels):
        at = f"{__name__}:kernel"
        kernels.candidate(Candidate("swiglu", "fast", BACKENDS, at, DEVICES, provider="fast"))


BACKENDS, DEVICES = ("torch", "mlx"), ("cpu",)


def kernel(gate, up):
    sigmoid = gate.sigmoid() if hasattr(gate, "sigmoid") else 1 / (1 + (-gate).exp())
    return gate * sigmoid * up
"""


@pytest.fixture
def checked(tmp_path: Path) -> Callable[..., Outcome]:
    def check(old: str = "", new: str = "", backend: str = "both") -> Outcome:
        assert not old or KERNEL.count(old) == 1
        file = tmp_path / "fast.py"
        file.write_text(KERNEL.replace(old, new) if old else KERNEL)
        (kernel,) = (one for one in CHECKS if one.name == "kernel")
        return kernel.run(Subject(f"{file}:Fast", backend=backend))

    return check


def test_a_kernel_that_is_right_passes(checked: Callable[..., Outcome]) -> None:
    outcome = checked(backend="torch")
    assert outcome.verdict == "passed", outcome
    for dtype in ("float32", "bfloat16", "float16"):
        assert f"swiglu=fast torch {dtype} " in outcome.found


def test_a_kernel_that_compiles_itself_is_run_without(checked: Callable[..., Outcome]) -> None:
    """No compiled code runs while reads of numbers are refused."""
    end = "    return gate * sigmoid * up\n"
    compiled = "\n\nimport torch\nkernel = torch.compile(kernel, fullgraph=True, backend='eager')\n"
    outcome = checked(end, end + compiled, backend="torch")
    assert outcome.verdict == "passed", outcome


@pytest.mark.broad(2)
@pytest.mark.parametrize(
    ("old", "new", "verdict", "found"),
    [
        ("sigmoid * up", "sigmoid * up * 1.1", "failed", "output 0 (1, 1, 1) is "),
        ("sigmoid * up", "sigmoid * up.detach()", "failed", "the gradient of up (1, 1, 1) is "),
        (
            "gate * sigmoid * up",
            "(gate * sigmoid * up)[..., :1]",
            "failed",
            "is float32 (2, 3, 1), not",
        ),
        ("sigmoid * up\n", "sigmoid * up, up\n", "failed", "2 outputs, not 1"),
        ('"swiglu", "fast"', '"swigluu", "fast"', "failed", "there is no such op"),
        ("}:kernel", "}:kernle", "failed", "kernle"),
        ('("cpu",)', '("cuda",)', "not applicable", "none serves a CPU here: swiglu=fast: serves"),
    ],
)
def test_what_is_said_of_others(
    checked: Callable[..., Outcome], old: str, new: str, verdict: str, found: str
) -> None:
    outcome = checked(old, new, backend="torch")
    assert outcome.verdict == verdict, outcome
    assert found in outcome.found
    assert outcome.cause or verdict == "not applicable"
