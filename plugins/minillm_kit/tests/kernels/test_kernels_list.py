"""Tests of ``minillm kernels list``: selected and rejected kernels with reasons, for this machine and others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minillm_core.inspection import CONTRACTS

pytest.importorskip("torch")

Program = Callable[..., tuple[int, str, str]]

NAMED = '''
"""Kernels."""

from minillm_core import Candidate, Plugin


class Rough(Plugin, api=1):
    """Kernels that are outside the tolerance, and for more memory than there is."""

    def kernel_provider(self, kernels):
        at = f"{__name__}:absent"
        kernels.candidate(Candidate("linear", "fp8", ("torch",), at, within_tolerance=False))
        kernels.candidate(Candidate("linear", "quick", ("torch",), at, requires=("no-such-thing>=1",)))


def absent(x, weight):
    raise NotImplementedError
'''


def listed(program: Program, *arguments: str) -> dict[str, Any]:
    code, out, err = program("kernels", "list", *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def states(found: dict[str, Any], op: str, backend: str = "torch") -> dict[str, tuple[str, str]]:
    return {
        one["kernel"]: (one["state"], one["reason"])
        for one in found["kernels"]
        if one["op"] == op and backend in one["backends"]
    }


def test_every_op_is_listed_with_its_tolerances(program: Program) -> None:
    found = listed(program, "--backend", "torch", "--device", "cpu")
    assert {one["op"] for one in found["kernels"]} == {*CONTRACTS}
    assert (found["backend"], found["dtype"], found["compiled"]) == ("torch", "float32", False)
    for op in CONTRACTS:
        taken = [name for name, (state, _) in states(found, op).items() if state == "taken"]
        assert len(taken) == 1, op
    for one in found["kernels"]:
        assert one["tolerance"] == dict(CONTRACTS[one["op"]].tolerance)
        assert one["within_tolerance"] == (one["kernel"] != "fp8")
    liger = next(one for one in found["kernels"] if one["provider"] == "minillm-liger")
    assert (liger["plugin"], liger["state"]) == ("liger", "cannot")


def test_a_run_on_another_machine_is_asked_for(program: Program) -> None:
    words = ("--backend", "torch", "--device", "cuda", "--plugins", "windows")
    found = listed(
        program, "attention", *words, "model.dim=64", "model.heads=4", "model.kv_heads=4"
    )
    assert (found["device"], found["dtype"], found["compiled"]) == ("cuda", "bfloat16", True)
    assert states(found, "attention")["flex"][0] == "taken"
    assert states(found, "attention")["sdpa"] == ("passed over", "flex is preferred")
    found = listed(
        program, "attention", *words, "--dtype", "float16", "--kernels", "attention=composed"
    )
    assert found["dtype"] == "float16"
    assert states(found, "attention")["composed"] == ("taken", "named by --kernels")
    assert states(found, "attention")["sdpa"] == ("passed over", "composed was named")


def test_kernels_that_are_only_where_named_or_lack_a_package(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rough.py").write_text(NAMED)
    words = ("linear", "--plugins", "./rough.py:Rough", "--device", "cpu", "--backend", "torch")
    found = states(listed(program, *words), "linear")
    assert found["fp8"][0] == "only where named"
    assert "only as --kernels linear=fp8" in found["fp8"][1]
    assert found["quick"][0] == "cannot"
    assert "needs no-such-thing>=1" in found["quick"][1]
    out = program("kernels", "list", *words)[1]
    assert re.search(r"fp8 .* only where named: .* only as --kernels linear=fp8", out)
    assert "--plugins ./rough.py:Rough" in out


def test_a_plugin_that_would_serve_is_named(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minillm_core.ops import select

    monkeypatch.setattr(select, "lacking", lambda requirement: None)
    words = ("swiglu", "--backend", "torch", "--device", "cuda", "train.compile=off")
    found = states(listed(program, *words), "swiglu")
    assert found["liger"] == ("plugin not named", "--plugins liger would offer it")
    found = states(listed(program, *words, "--plugins", "liger"), "swiglu")
    assert found["liger"][0] == "taken"
    found = states(listed(program, *words, "--plugins", "liger", "liger.swiglu=false"), "swiglu")
    assert found["liger"] == ("passed over", "its plugin does not offer it with these options")


def test_the_table(program: Program) -> None:
    code, out, err = program("kernels", "list", "rotate", "--backend", "mlx", "--device", "cpu")
    assert (code, err) == (0, "")
    heading, *rows, last = out.splitlines()
    assert heading.rstrip() == "rotate: within 1e-06 in float32"
    assert ["table", "core", "mlx:", "any", "taken:", "preferred"] in [row.split() for row in rows]
    assert "serves metal, cuda, not cpu" in out
    assert last.startswith("for a run with mlx, cpu, float32, compiled;")


@pytest.mark.parametrize("command", ["list", "check", "bench"])
def test_tables_are_whole_in_a_narrow_terminal(
    command: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    few = {
        "list": (),
        "check": ("linear_cross_entropy", "--case", "0", "--dtype", "float32"),
        "bench": ("swiglu", "--shape", "N=8", "--shape", "F=8", "--repeats", "1"),
    }
    code, out, _ = program("kernels", command, *few[command], "--backend", "torch")
    assert code == 0
    assert "\u2026" not in out, "cut"
    table = out.split("not checked")[0].split("for a run with")[0]  # one long line follows
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (("atention",), "there is no op 'atention'", "did you mean attention?"),
        (("--dtype", "float8"), "where: --dtype float8", "did you mean float32?"),
        (("--preset", "tinny"), "preset", "tiny"),
        (("model.lay=3",), "model.lay", "layers"),
        (("--backend", "jax"), "jax", ""),
        (("--kernels", "?"), "'?' is not a policy", ""),
        (("swiglu", "--kernels", "foo=bar"), "no op 'foo' in this plan", "one of attention, "),
        (("swiglu", "--kernels", "swiglu=bar"), "no kernel 'bar' for swiglu", "one of: composed"),
        (("attention", "--kernels", "swiglu=bar"), "no kernel 'bar' for swiglu", "--plugins"),
    ],
)
def test_what_is_refused(program: Program, arguments: tuple[str, ...], what: str, fix: str) -> None:
    code, out, err = program("kernels", "list", *arguments)
    assert (code, out) == (2, "")
    assert what in err
    assert fix in err


def test_a_kernel_that_is_named_and_cannot_serve_is_listed_with_its_reason(
    program: Program,
) -> None:
    words = ("--backend", "torch", "--device", "cpu", "--dtype", "auto")
    found = states(listed(program, "attention", *words, "--kernels", "attention=flex"), "attention")
    assert found["flex"] == ("cannot", "serves cuda, not cpu")
    assert found["sdpa"][0] == "passed over"
    found = states(listed(program, "swiglu", *words, "--kernels", "swiglu=liger"), "swiglu")
    assert found["liger"] == ("cannot", "serves cuda, not cpu")


@pytest.mark.slow
def test_no_framework_is_imported() -> None:
    code = (
        "import sys; from minillm_core.cli.main import main; main(['kernels', 'list']);"
        "print([m for m in ('torch', 'mlx.core', 'liger_kernel') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
