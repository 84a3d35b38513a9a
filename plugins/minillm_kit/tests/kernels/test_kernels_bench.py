"""Tests of ``minillm kernels bench``: turns, figures and limits; no test depends on speed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minillm_core.inspection import CONTRACTS, TORCH_KERNELS

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

from minillm_kit.kernels import bench as timing
from minillm_kit.kernels.bench import Limits, bench
from minillm_kit.kernels.calls import calls_on
from minillm_kit.kernels.offers import Offer, offers
from minillm_kit.kernels.workloads import WORKLOADS, Work

Program = Callable[..., tuple[int, str, str]]

TINY = {
    "N": 8,
    "C": 4,
    "O": 4,
    "R": 4,
    "V": 16,
    "B": 1,
    "T": 8,
    "H": 2,
    "K": 1,
    "D": 4,
    "F": 4,
    "window": 0,
}


@pytest.mark.broad(5)
@pytest.mark.parametrize("op", [*CONTRACTS])
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_every_op_is_timed(op: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TURN", 0.0)
    mine = [one for one in offers().of([op]) if backend in one.candidate.backends]
    said: list[str] = []
    found: Any = bench(
        mine,
        calls_on(backend, "cpu"),
        "float32",
        {letter: TINY[letter] for letter in WORKLOADS[op].small},
        lambda: Limits(1e9, 1e9),
        repeats=2,
        say=said.append,
    )
    assert len(said) == 2
    assert found["kernels"]
    for one in found["kernels"]:
        for name, work in found["work"].items():
            figures = one[name]
            assert len(figures["seconds_by_turn"]) == 2
            assert 0 < figures["low"] <= figures["seconds"] <= figures["high"]
            least = max(work["flops"] / 1e9, work["bytes"] / 1e9)
            assert work["least_seconds"] == least
            assert figures["share_of_limit"] == pytest.approx(least / figures["seconds"])
            assert (figures["extra_bytes"] is None) == (backend == "torch")
    assert found["kernels"][0]["forward"]["speed_to_first"] == 1.0
    assert ("both" in found["work"]) == (WORKLOADS[op].backward is not None)


def test_the_slower_limit_binds() -> None:
    known = Limits(flops=100.0, bytes=10.0)
    assert known.least_seconds(Work(1000, 5), 4) == (10.0, "FLOPs")
    assert known.least_seconds(Work(10, 50), 4) == (20.0, "bytes")


def test_kernels_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, order = calls_on("torch", "cpu"), []

    class Timed:
        def __init__(self, kernel: Any, wanted: Any) -> None:
            self.name = kernel.__name__ + ("+" if wanted else "")

        def seconds(self, times: int) -> float:
            order.append(self.name)
            return 0.5 if "dense" in self.name else 1.0

        def extra_bytes(self) -> int:
            return 7

    def timed(kernel: Any, *rest: Any, wanted: Any = (), **more: Any) -> Timed:
        return Timed(kernel, wanted)

    monkeypatch.setattr(calls, "timed", timed)
    names = ("chunked", "dense")
    mine = [Offer(c) for c in TORCH_KERNELS if c.op == "linear_cross_entropy" and c.name in names]
    found: Any = bench(
        mine, calls, "float32", {"N": 2, "C": 2, "V": 3}, lambda: Limits(1, 1), repeats=2, say=str
    )
    assert order[-8:] == ["chunked", "chunked+", "dense", "dense+"] * 2
    assert [one["forward"]["speed_to_first"] for one in found["kernels"]] == [1.0, 2.0]


@pytest.mark.slow
def test_the_command(program: Program) -> None:
    words = ("swiglu", "--device", "cpu", "--shape", "N=4", "--shape", "F=3", "--repeats", "1")
    code, out, err = program("kernels", "bench", *words, "--json")
    assert code == 0
    assert err.splitlines()[0] == "timing on torch cpu, in float32"
    assert "measuring a product in float32, and a copy" in err
    first, second = json.loads(out)["benches"]
    assert (first["backend"], second["backend"]) == ("torch", "mlx")
    assert first["sizes"] == {"N": 4, "F": 3}
    assert first["refused"] == {"liger": "serves cuda, not cpu"}
    assert first["limits"]["flops_per_second"] > 0
    code, out, _ = program("kernels", "bench", *words, "--backend", "torch")
    assert code == 0
    assert "swiglu N=4 F=3, float32 on torch cpu; limits seen: " in out
    assert "not timed: liger: serves cuda, not cpu" in out


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (("swiglue",), "there is no op 'swiglue'", "did you mean swiglu?"),
        (("swiglu", "--shape", "V=3"), "no op that is timed has a size 'V'", "one of N, F"),
        (("--shape", "N=x"), "'N=x' is not a size", "--shape N=65536"),
        (("swiglu", "--shape", "N=0"), "a size is at least 1", "--shape N=1024"),
        (("--dtype", "float8"), "not timed in 'float8'", "did you mean float32?"),
        (
            ("swiglu", "--kernel", "liger", "--device", "cpu"),
            "'liger' cannot serve here",
            "kernels list",
        ),
        (("--device", "cuda:9"), "cannot use 'cuda:9'", "minillm doctor"),
        (("--repeats", "0"), "--repeats", "--help"),
        (
            ("attention", "--shape", "H=4", "--shape", "K=3"),
            "H=4 heads cannot share K=3 key-value heads",
            "--shape H=4 --shape K=4",
        ),
        (("rotate", "--shape", "D=33"), "D=33 is odd", "--shape D=34"),
        (
            ("swiglu", "--device", "cpu", "--shape", "N=900000000", "--shape", "F=900000"),
            "the arguments of swiglu do not fit into memory",
            "smaller sizes",
        ),
        (
            ("swiglu", "--device", "cpu", "--shape", f"N={10**24}"),  # beyond 64 bits
            "the arguments of swiglu do not fit into memory",
            "smaller sizes",
        ),
        (("--plugins", "muon"), "plugin 'muon' brings no kernel", "leave it out"),
    ],
)
def test_what_is_refused(program: Program, arguments: tuple[str, ...], what: str, fix: str) -> None:
    code, out, err = program("kernels", "bench", *arguments)
    assert (code, out) == (2, "")
    assert what in err
    assert fix in err


RAISES = """
from minillm_core import Candidate, Plugin


class Raises(Plugin, api=1, backends=("torch",)):
    \"\"\"Raises.\"\"\"

    def kernel_provider(self, kernels):
        at = f"{__name__}:raises"
        kernels.candidate(Candidate("swiglu", "raises", ("torch",), at, provider="mine"))


def raises(gate, up):
    raise ValueError("a bad\\nday")
"""


@pytest.mark.parametrize("error", ["ValueError", "SystemExit"])
def test_a_kernel_that_raises_is_named_and_the_others_are_timed(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("raises.py").write_text(RAISES.replace("ValueError", error))
    words = ("kernels", "bench", "swiglu", "--shape", "N=4", "--shape", "F=3", "--repeats", "1")
    words += ("--backend", "torch", "--device", "cpu", "--plugins", "./raises.py:Raises")
    code, out, err = program(*words)
    assert code == 3
    assert "composed  forward" in out
    assert f"not timed: raises: raised {error}: a bad day" in out
    assert "1 kernel raised an exception: swiglu=raises torch" in err
    code, out, _ = program(*words, "--kernel", "raises", "--json")
    (one,) = json.loads(out)["benches"]
    assert (code, one["raised"]) == (3, {"raises": f"{error}: a bad day"})
