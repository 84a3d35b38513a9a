"""Tests of ``minillm kernels check``: refusals, failures and their messages, JSON."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minillm_core import Candidate
from minillm_core.inspection import MLX_KERNELS, TORCH_KERNELS

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

from minillm_kit import kernels_check
from minillm_kit.kernels.calls import calls_on
from minillm_kit.kernels.check import Chooser, Report, Row, Target, plan_check, run_check
from minillm_kit.kernels.examples import CASES
from minillm_kit.kernels.offers import Offer
from minillm_kit.kernels.problem import DTYPES
from minillm_kit.kernels.trial import Error

Program = Callable[..., tuple[int, str, str]]

MINE = '''
"""A gate."""

from minillm_core import Candidate, Plugin

print("at module level")


class Mine(Plugin, api=1):
    """Kernels."""

    def kernel_provider(self, kernels):
        for name in ("mine", "rough"):
            kernels.candidate(
                Candidate(
                    "swiglu", name, ("torch", "mlx"), f"{__name__}:{name}", ("cpu",), accepts=wide,
                    within_tolerance=name == "mine", provider="mine",
                )
            )


def wide(request):
    return "is for float32" if request.dtype == "float16" else None


def mine(gate, up):
    print("in a kernel")
    sigmoid = gate.sigmoid() if hasattr(gate, "sigmoid") else 1 / (1 + (-gate).exp())
    return (gate * sigmoid * up).astype(gate.dtype) if hasattr(gate, "astype") else gate * sigmoid * up


def rough(gate, up):
    return mine(gate, up) * 1.06  # as far off as fp8
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Write the plugin into the current folder, with a line replaced; return its spec."""
    monkeypatch.chdir(tmp_path)

    def write(old: str = "", new: str = "") -> str:
        assert MINE.count(old) == 1 or not old
        Path("mine.py").write_text(MINE.replace(old, new) if old else MINE)
        return "./mine.py:Mine"

    return write


FEW = ("--case", "0", "--case", "1")
CORE = (*TORCH_KERNELS, *MLX_KERNELS)


@pytest.mark.parametrize(
    "one", CORE[:: len(CORE) // 6], ids=lambda c: f"{c.backends[0]}-{c.op}-{c.name}"
)
def test_the_cores_own_keep_their_contracts(one: Candidate, quick: Chooser) -> None:
    """Some of them, in small cases: the next test has all, in every case and dtype."""
    target = Target(Offer(one), calls_on(one.backends[0], "cpu"))
    rows = plan_check([target], ["float32"], quick)
    assert not run_check(rows).failed
    assert rows[0].cases or rows[0].refused


@pytest.mark.slow
def test_all_that_can_run_here_is_right(program: Program) -> None:
    code, out, err = program("kernels", "check", "--json", "--device", "cpu")
    report = json.loads(out)
    assert (code, report["passed"]) == (0, True), err
    served = [one for one in report["kernels"] if one["verdict"] == "passed"]
    assert {one["backend"] for one in served} == {"torch", "mlx"}
    assert {one["op"] for one in served} == {*CASES}
    assert {one["dtype"] for one in served} == {*DTYPES}
    tried = {
        (one["backend"], one["op"], one["kernel"], one["dtype"])
        for one in report["kernels"]
        if one["cases"] or one["refused"]
    }
    assert tried >= {(c.backends[0], c.op, c.name, dtype) for c in CORE for dtype in DTYPES}


def test_a_table_and_a_line_at_once(program: Program) -> None:
    code, out, err = program("kernels", "check", "swiglu", "linear", *FEW, "--device", "cpu")
    assert code == 0
    first, *_ = err.splitlines()
    assert re.fullmatch(r"checking 2 kernels on torch cpu, mlx cpu: \d+ cases, seed 11", first)
    heading, *rows = [line.split() for line in out.splitlines() if line]
    assert heading[:5] == ["kernel", "on", "float32", "bfloat16", "float16"]
    assert [row[:3] for row in rows if row[0].startswith("linear")] == [
        ["linear=matmul", "torch", "cpu"],
        ["linear=matmul", "mlx", "cpu"],
    ]
    assert "not checked, serves cuda, not cpu: swiglu=liger torch" in out.splitlines()
    assert "all held" in out


def test_a_kernel_of_a_file_and_one_that_is_rough_by_its_own_word(
    program: Program, mine: Any
) -> None:
    words = ("kernels", "check", "swiglu", "--plugins", mine(), "--backend", "torch", *FEW)
    code, out, err = program(*words, "--json")
    report = json.loads(out)
    assert code == 0
    assert "in a kernel" in err
    own = {
        (one["kernel"], one["dtype"]): one for one in report["kernels"] if one["provider"] == "mine"
    }
    assert own["mine", "float32"]["error_over_tolerance"] < 1
    assert own["mine", "float16"]["verdict"] == "refused"
    assert own["mine", "float16"]["refused"] == "is for float32"
    rough = own["rough", "float32"]
    assert (rough["verdict"], rough["within_tolerance"]) == ("passed", False)
    assert rough["error_over_tolerance"] > 1
    out = program(*words)[1]
    assert re.search(rf"swiglu=rough .*{rough['error_over_tolerance']:.2f}\*", out)
    assert "* outside it, as the kernel declares (used only where named)" in out
    assert re.search("not checked, is for float32: .*swiglu=rough torch float16", out)


def test_a_failure_says_what_where_and_the_command_that_repeats_it(
    program: Program, mine: Any
) -> None:
    spec = mine("return (gate", "return 1.01 * (gate")
    words = ("kernels", "check", "swiglu", "--plugins", spec, "--kernel", "mine", "--seed", "5")
    code, out, err = program(*words, "--dtype", "float32", "--backend", "mlx")
    assert code == 3
    assert "swiglu=mine mlx float32 failed: output 0 (1, 1, 1) is " in err
    assert err.splitlines()[-1].startswith("1 row of the table failed: swiglu=mine mlx float32")
    assert "FAILED" in out
    assert "found: output 0 (1, 1, 1) is " in out
    assert "in:    shape=1x1x1" in out
    again = next(line.split(maxsplit=1)[1] for line in out.splitlines() if "again:" in line)
    assert "--seed 5 --case 0" in again
    code, out, _ = program(*shlex.split(again)[1:], "--json")
    (row,) = json.loads(out)["kernels"]
    assert (code, row["verdict"], row["cases"]) == (3, "failed", 1)
    assert row["failures"][0]["again"] == again
    assert row["failures"][0]["property"] == "output"


@pytest.mark.parametrize("error", ["SystemError", "SystemExit"])
def test_a_kernel_that_raises_is_a_failure_and_no_defect(
    program: Program, mine: Any, error: str
) -> None:
    spec = mine('    print("in a kernel")\n', f"    raise {error}('a\\nbad day')\n")
    words = ("--plugins", spec, "--kernel", "mine", "--dtype", "float32", "--backend", "torch")
    code, out, _ = program("kernels", "check", *words, *FEW)
    assert code == 3
    assert f"found: {error}: a bad day" in out


@pytest.mark.parametrize("command", ["check", "list", "bench"])
def test_an_accepts_that_raises_is_its_plugins_fault(
    program: Program, mine: Any, command: str
) -> None:
    spec = mine(
        'return "is for float32" if request.dtype == "float16" else None',
        'return request.facts["no such fact"]',
    )
    words = ("swiglu", "--plugins", spec, "--backend", "torch", "--device", "cpu")
    code, out, err = program("kernels", command, *words)
    assert (code, out) == (3, "")
    assert "plugin 'mine' raised in wide, while kernels are chosen" in err
    assert "KeyError: 'no such fact'" in err
    assert "tell the authors" not in err


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (("swiglue",), "there is no op 'swiglue'", "did you mean swiglu?"),
        (("xyz",), "there is no op 'xyz'", "one of linear, "),
        (("--kernel", "composd"), "no kernel 'composd' for any op", "did you mean composed?"),
        (("swiglu", "--kernel", "sdpa"), "no kernel 'sdpa' for swiglu", "one of composed, liger"),
        (("--dtype", "float8"), "not checked in 'float8'", "float32"),
        (("--backend", "jax"), "no backend 'jax'", "--backend auto, torch, mlx"),
        (("--device", "tpu"), "no backend knows a device 'tpu'", "one of cpu, cuda, gpu, mps"),
        (("--backend", "mlx", "--device", "cuda"), "mlx knows no device 'cuda'", "cpu or gpu"),
        (
            ("--kernel", "liger", "--device", "cpu"),
            "'liger' cannot serve here: serves cuda",
            "kernels list",
        ),
        (
            ("--kernel", "flex", "--backend", "mlx"),
            "no kernel of attention=flex is for mlx",
            "--backend torch",
        ),
        (("swiglu", "--case", "99"), "there is no case 99", "0 to 4"),
        (
            ("token_losses", "--backend", "torch", "--device", "cpu", "--case", "12"),
            "no kernel serves: the cases chosen are for other devices",
            "another --device",
        ),
        (("--plugins", "no_such"), "no plugin 'no_such'", ""),
        (("--plugins", "./no.py:No"), "there is no file ./no.py", ""),
        (("swiglu", "--plugins", "muon"), "plugin 'muon' brings no kernel", "leave it out"),
        (("swiglu", "--plugins", "metal,-muon"), "--plugins removes none here", "--kernel NAME"),
    ],
)
def test_what_is_refused(program: Program, arguments: tuple[str, ...], what: str, fix: str) -> None:
    code, out, err = program("kernels", "check", *arguments)
    assert (code, out) == (2, "")
    assert what in err
    assert fix in err.partition("fix:")[2]
    assert len(err.splitlines()) <= 12


def test_an_installed_plugin_that_is_broken_is_left_out_and_said(
    program: Program, monkeypatch: pytest.MonkeyPatch, mine: Any
) -> None:
    from minillm_kit.kernels import offers

    mine('print("at module level")', 'raise ValueError("at module level")')
    monkeypatch.setattr(offers, "_providers", lambda: ["./mine.py:Mine"])
    code, _, err = program(
        "kernels", "check", "swiglu", "--backend", "torch", "--device", "cpu", *FEW
    )
    assert code == 0
    assert "note: the kernels of plugin './mine.py:Mine' are left out: " in err


def test_what_is_given_twice_is_checked_once(program: Program, mine: Any) -> None:
    spec = mine()
    words = ("--plugins", f"{spec},{spec}", "--kernel", "mine", "--backend", "torch", "--case", "0")
    _, out, err = program("kernels", "check", *words, *("--dtype", "float32") * 2, "--json")
    assert [one["kernel"] for one in json.loads(out)["kernels"]] == ["mine"]
    assert "checking 1 kernel on torch cpu: 1 case, seed 11" in err


def test_a_kernel_that_cannot_serve_says_where_it_was_named(program: Program) -> None:
    err = program("kernels", "check", "--kernel", "liger", "--device", "cpu")[2]
    assert "  where: --kernel liger\n" in err


def test_torch_without_memory_on_a_cpu() -> None:
    import torch

    with pytest.raises(RuntimeError) as none_left:
        torch.empty(1 << 58)
    calls = calls_on("torch", "cpu")
    assert calls.out_of_memory(none_left.value)
    assert not calls.out_of_memory(RuntimeError("another"))


def test_memory_that_is_not_there_is_no_failure(mine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_on("torch", "cpu")
    (one,) = (c for c in TORCH_KERNELS if c.op == "swiglu")

    def none_left(*args: Any, **more: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(calls, "call", none_left)
    report = run_check(
        plan_check([Target(Offer(one), calls)], ["float32"], lambda c: c is CASES["swiglu"][0])
    )
    (row,) = report.data()["kernels"]
    assert (row["verdict"], row["without_memory"]) == ("no memory", ["shape=1x1x1"])
    file = StringIO()
    kernels_check.render(report, Console(file=file))
    assert (
        "not checked, no memory for shape=1x1x1: swiglu=composed torch float32" in file.getvalue()
    )


def test_a_device_that_is_lost_ends_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, tries = calls_on("torch", "cpu"), []

    def lost(*args: Any, **more: Any) -> None:
        tries.append(1)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(calls, "poison", lost)
    (one,) = (c for c in TORCH_KERNELS if c.op == "swiglu")
    report = run_check(plan_check([Target(Offer(one), calls)], ["float32"]))
    assert len(tries) == 2  # the first case, and the check that the device still responds
    assert report.data()["lost"] == report.data()["kernels"][0]["failures"][0]["again"]
    file = StringIO()
    kernels_check.render(report, Console(file=file))
    assert "the device no longer responds; nothing was checked after" in file.getvalue()


def test_a_spread_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = (c for c in TORCH_KERNELS if c.op == "swiglu")
    row = Row(Target(Offer(one), calls_on("torch", "cpu")), "float32", cases=[1], spread=3e-8)
    row.worst, row.worst_case = Error(0.5, "output 0"), 1
    file = StringIO()
    kernels_check.render(Report((row,), 11, 1.0), Console(file=file))
    assert "3e-08" in file.getvalue()
    assert "output 0, shape=2x3x7" in file.getvalue()


def test_a_case_that_is_made_once_is_made_in_one_dtype() -> None:
    (one,) = (c for c in MLX_KERNELS if (c.op, c.name) == ("linear_cross_entropy", "chunked"))
    rows = plan_check(
        [Target(Offer(one), calls_on("mlx", "cpu"))], DTYPES, lambda case: case.effort == "once"
    )
    assert [len(row.cases) for row in rows] == [1, 0, 0]


def test_a_kernel_that_compiles_itself_is_called_in_all_layouts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each layout takes seconds to compile; the values of every case are checked anyway."""
    calls, layouts, compiled = calls_on("torch", "cpu"), [], [0]
    plain = calls.call

    def call(*args: Any, layout: Any = "plain", **more: Any) -> Any:
        layouts.append(layout)
        compiled[0] += 1
        return plain(*args, layout=layout, **more)

    monkeypatch.setattr(calls, "call", call)
    monkeypatch.setattr(calls, "compilations", lambda: compiled[0])
    (one,) = (c for c in TORCH_KERNELS if c.op == "swiglu")
    chosen = CASES["swiglu"][:3]
    report = run_check(plan_check([Target(Offer(one), calls)], ["float32"], chosen.__contains__))
    assert not report.failed
    assert report.data()["kernels"][0]["compiles"]
    assert (layouts.count("sliced"), layouts.count("transposed")) == (1, 1)
    assert len(layouts) == 10 + 2 * 3
