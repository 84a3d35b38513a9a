"""Tests that faulty kernels are found and correct ones pass, as documented in docs/kernels.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

from minillm_kit.kernels.calls import calls_on  # noqa: E402  (needs torch)
from minillm_kit.kernels.check import SEED, Chooser, Target, plan_check  # noqa: E402
from minillm_kit.kernels.examples import CASES  # noqa: E402
from minillm_kit.kernels.offers import Offer, offers  # noqa: E402
from minillm_kit.kernels.problem import problem  # noqa: E402
from minillm_kit.kernels.trial import PROPERTIES, Tried, trial  # noqa: E402

HERE = Path(__file__).parent
SPEC = f"{HERE / 'faults.py'}:Faults"


@pytest.fixture(scope="module")
def planted() -> dict[tuple[str, str], Offer]:
    """Return (op, name) -> the kernel."""
    found = offers([SPEC]).kernels
    return {(one.candidate.op, one.candidate.name): one for one in found if one.plugin == SPEC}


def faults() -> list[tuple[str, ...]]:
    """Return the faults of faults.py, read from the file, which is loaded as a plugin under another name."""
    space: dict[str, object] = {"__name__": "faults", "__file__": str(HERE / "faults.py")}
    exec(compile((HERE / "faults.py").read_bytes(), "faults.py", "exec"), space)
    return [tuple(one) for one in space["FAULTS"]]  # type: ignore[attr-defined]


FAULTS = faults()


def tried(offer: Offer, dtype: str, chosen: Chooser) -> Tried:
    """Run one case after another, until the first failure."""
    target = Target(offer, calls_on(offer.candidate.backends[0], "cpu"))
    (row,) = plan_check([target], [dtype], chosen)
    assert row.cases
    found = Tried()
    for index in row.cases:
        asked = (offer.candidate.op, index, dtype, SEED)
        found = trial(offer.candidate, target.calls, problem(*asked), problem(*asked, 1))
        if found.failures:
            break
    return found


@pytest.mark.broad(6)
@pytest.mark.parametrize("fault", [one for one in FAULTS if one[3]], ids=lambda one: one[0])
def test_a_fault_is_found(planted: dict, fault: tuple[str, ...]) -> None:
    name, op, _, caught_by, dtype, *_ = fault
    found = tried(planted[op, name], dtype, lambda case: case.effort == "usual")
    assert [one.property for one in found.failures][:1] == [caught_by], found


@pytest.mark.parametrize("op", ["linear_cross_entropy", "attention", "swiglu", "rms_norm"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_kernels_that_were_made_wrong_are_right(
    planted: dict, op: str, dtype: str, quick: Chooser
) -> None:
    assert not tried(planted[op, "right"], dtype, quick).failures


def test_what_is_missed(planted: dict, quick: Chooser) -> None:
    """A fault that shows late is not found; offsets beyond 31 bits only by the cases of --large."""
    assert not tried(planted["swiglu", "slow_drift"], "float32", quick).failures
    largest = {
        one.effort: max(int(n) * int(v) for n, v in re.findall(r"N=(\d+) .*V=(\d+)", one.name))
        for one in sorted(CASES["linear_cross_entropy"], key=lambda one: one.effort == "large")
    }
    assert largest["usual"] < 2**31 < largest["large"]


def test_the_page_lists_every_fault(repository: Path) -> None:
    page = (repository / "docs" / "kernels.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    wanted = [
        (name, op, what, f"`{caught_by}`" + ("" if dtype == "float32" else f", in {dtype}"))
        if caught_by
        else (name, op, what, "missed")
        for name, op, what, caught_by, dtype, *_ in FAULTS
    ]
    assert rows == wanted
    assert {one[3] for one in FAULTS if one[3]} <= PROPERTIES.keys()
    for name, proves in PROPERTIES.items():
        assert f"| `{name}` | {proves} |" in page
