"""The test of a kernel on a case: repeated calls, compared with float64 and with each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from minillm_core import Candidate
from minillm_core.commands import counted, plain
from minillm_core.inspection import CONTRACTS
from minillm_kit.check import HostRead
from minillm_kit.kernels.calls import Calls, Kernel, Layout, NotArrays, Results, loaded
from minillm_kit.kernels.problem import IN_FLOAT32, Problem, gradients

PROPERTIES: Mapping[str, str] = {
    "runs": "it runs what it accepted",
    "shape": "its outputs have the number, the shapes and the dtypes of the contract",
    "finite": "no result is NaN or infinite, whatever fresh memory and the memory beside arrays hold",
    "output": "outputs equal the reference's, as a whole and row by row",
    "gradient": "gradients equal the reference's, for upstream gradients other than one",
    "constant": "no other output carries a gradient",
    "inputs": "its arguments, upstream gradients and the memory around them stay as they were",
    "fresh": "new inputs of the same shapes give correct results, and the first inputs give their first results again",
    "repeats": "on a CPU the same inputs give the same bits",
    "forward": "without gradients the outputs are the same",
    "alone": "the gradient of one argument is the same where the others are constants",
    "layout": "arrays may be parts of wider ones, or transposed; upstream gradients broadcast",
}
"""The properties checked for a kernel in each case, in order."""

BY_ROW = 8.0
"""Allowed error of a single row, in tolerances: the contract's tolerance is for all rows together."""

ROUGH = 0.25
"""Error at which a kernel with ``within_tolerance=False`` fails, as a fraction of the reference's norm: fp8 products
have 0.06 to 0.11, a missing array 1."""


@dataclass(frozen=True)
class Failure:
    """A property that does not hold."""

    property: str
    found: str  # numbers
    error: BaseException | None = field(default=None, compare=False, repr=False)  # that was raised


@dataclass(frozen=True)
class Error:
    """A distance from the reference, in tolerances of the contract."""

    share: float
    what: str  # "output 0", "the gradient of k"


NONE = Error(0.0, "")


@dataclass
class Tried:
    """The results of a kernel in a case."""

    worst: Error = NONE
    spread: float = 0.0  # between two calls with equal inputs, in the units of errors
    failures: list[Failure] = field(default_factory=list)
    no_memory: bool = False

    def fail(self, name: str, found: str, error: BaseException | None = None) -> None:
        """Record a failure, at most one per property."""
        if all(one.property != name for one in self.failures):
            self.failures.append(Failure(name, found, error))


def trial(
    candidate: Candidate, calls: Calls, first: Problem, other: Problem, *, alike: bool = False
) -> Tried:
    """Test a kernel on a case.

    Args:
        candidate: the kernel; it has accepted the case.
        calls: of the device to call it on.
        first: the case.
        other: the same case with other values.
        alike: only make calls for which a kernel that compiles itself need not recompile.
    """
    tried = Tried()
    try:
        kernel = loaded(candidate)
        called = partial(_called, kernel, calls)
        if alike:
            _hold_alike(tried, called, candidate, calls, first, other)
        else:
            _hold(tried, called, candidate, calls, first, other)
    except NotArrays as error:
        tried.fail("shape", str(error))
    except HostRead as error:
        tried.fail(
            "runs", f"{error} (.item(), float(), bool() or if), which waits for the device", error
        )
    except (Exception, SystemExit) as error:
        if calls.out_of_memory(error):
            tried.no_memory = True
        else:
            tried.fail("runs", plain(f"{type(error).__name__}: {error}", 300), error)
    return tried


def _called(
    kernel: Kernel,
    calls: Calls,
    of: Problem,
    *,
    upstream: Sequence[np.ndarray] | None = None,
    wanted: Sequence[str] | None = None,
    layout: Layout = "plain",
    unread: bool = False,
) -> Results:
    """Call a kernel on a problem; by default all floats are differentiated."""
    calls.poison([x.shape for x in (*of.outputs, *of.floats.values())], of.dtype)
    return calls.call(
        kernel,
        of.arguments,
        [*of.floats],
        of.upstream if upstream is None else upstream,
        dtype=of.dtype,
        wanted=[*of.floats] if wanted is None else wanted,
        layout=layout,
        unread=unread,
    )


def _hold(
    tried: Tried,
    called: Callable[..., Results],
    candidate: Candidate,
    calls: Calls,
    first: Problem,
    other: Problem,
) -> None:
    with calls.uninitialised():
        got = called(first)
    if not _shaped(tried, got, first):
        return  # the values are meaningless
    _compare(tried, candidate, got, first)
    if extra := [index for index in got.attached if index >= len(first.upstream)]:
        tried.fail("constant", f"output {extra[0]} carries a gradient")
    if first.case.effort != "usual":
        return
    if calls.kind == "cpu" and not candidate.host_masks:  # there all arrays are on the host
        called(first, unread=True)
    _hold_alike(tried, called, candidate, calls, first, other)
    _compare(tried, candidate, called(first, wanted=()), first, as_="forward")
    for name in first.floats if len(first.floats) > 1 else ():
        _compare(tried, candidate, called(first, wanted=[name]), first, as_="alone")
    ups = [np.asarray(0.625, np.float32) for _ in first.upstream]
    whole = [np.broadcast_to(c, y.shape) for c, y in zip(ups, first.upstream, strict=True)]
    exact = gradients(first, whole)
    sliced = called(first, upstream=ups, layout="sliced")
    _compare(tried, candidate, sliced, first, exact, as_="layout")
    _compare(tried, candidate, called(first, layout="transposed"), first, as_="layout")


def _hold_alike(
    tried: Tried,
    called: Callable[..., Results],
    candidate: Candidate,
    calls: Calls,
    first: Problem,
    other: Problem,
) -> None:
    """Call a kernel with other inputs of the same shapes and layouts, and twice with the first ones."""
    got = called(other)
    if not _shaped(tried, got, other):
        return
    _compare(tried, candidate, got, other, as_="fresh")
    again, repeated = called(first), called(first)
    _compare(tried, candidate, again, first, as_="fresh")
    _repeats(tried, calls, again, repeated)


def _shaped(tried: Tried, got: Results, of: Problem) -> bool:
    dtype = "float32" if of.case.op in IN_FLOAT32 else of.dtype
    shapes = [(y.shape, one) for y, one in zip(got.outputs, got.dtypes, strict=True)]
    wanted = [(y.shape, dtype) for y in of.outputs]
    if shapes == wanted:
        return True
    if len(shapes) != len(wanted):
        tried.fail("shape", f"{counted(len(shapes), 'output')}, not {len(wanted)}")
        return False
    index = next(i for i, pair in enumerate(zip(shapes, wanted, strict=True)) if len({*pair}) > 1)
    (shape, kind), (right, its) = shapes[index], wanted[index]
    tried.fail("shape", f"output {index} is {kind} {shape}, not {its} {right}")
    return False


def _compare(
    tried: Tried,
    candidate: Candidate,
    got: Results,
    of: Problem,
    exact: Mapping[str, np.ndarray] | None = None,
    *,
    as_: str | None = None,
) -> None:
    """Compare results with the reference.

    Args:
        tried: receives the failures and errors.
        candidate: the kernel.
        got: the results, with gradients of the wanted arguments only.
        of: the problem.
        exact: gradients for other upstream gradients than the problem's.
        as_: the property to report for an error; None: that of the erroneous array.
    """
    tolerance = CONTRACTS[candidate.op].tolerance[of.dtype]
    if got.written:
        tried.fail("inputs", f"{got.written[0]} was written to")
    for kind, what, y, want in _pairs(got, of, exact or of.gradients):
        if not np.isfinite(y).all():
            tried.fail(as_ or "finite", f"{what} {y.shape} has {_bad(y)}")
            continue
        error = max(_error(y, want), _row_error(y, want) / BY_ROW) / tolerance
        if error > tried.worst.share:
            tried.worst = Error(error, what)
        if error <= 1:
            continue
        if candidate.within_tolerance:
            tried.fail(
                as_ or kind,
                f"{what} {want.shape} is {_error(y, want):.1e} from the reference "
                f"(tolerance {tolerance:.0e}){_where(y, want, tolerance)}",
            )
        elif (fraction := _fraction(y, want)) >= ROUGH:
            tried.fail(
                as_ or kind,
                f"{what} {want.shape} is {fraction:.1e} of the reference's norm from it "
                f"(below {ROUGH} with within_tolerance=False)",
            )


def _pairs(
    got: Results, of: Problem, exact: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    for index, (y, want) in enumerate(zip(got.outputs, of.outputs, strict=True)):
        yield "output", f"output {index}", y, want
    for name, gradient in got.gradients.items():
        yield "gradient", f"the gradient of {name}", gradient, exact[name]


def _repeats(tried: Tried, calls: Calls, a: Results, b: Results) -> None:
    pairs = [
        *((f"output {i}", *both) for i, both in enumerate(zip(a.outputs, b.outputs, strict=True))),
        *((f"the gradient of {n}", x, b.gradients[n]) for n, x in a.gradients.items()),
    ]
    for what, x, y in pairs:
        if not np.array_equal(x, y, equal_nan=True):
            spread = _error(x, y)
            tried.spread = max(tried.spread, spread if np.isfinite(spread) else np.inf)
            if calls.kind == "cpu":
                tried.fail("repeats", f"{what} differs by {spread:.1e} between two equal calls")


def _error(got: np.ndarray, want: np.ndarray) -> float:
    """Compute the error as defined by the contract."""
    if not want.size:
        return 0.0
    size = max(float(np.linalg.norm(want)), want.size**0.5)
    return float(np.linalg.norm(got - want)) / size


def _fraction(got: np.ndarray, want: np.ndarray) -> float:
    """Compute the error as a fraction of the reference's norm; infinite if the reference is 0."""
    norm = float(np.linalg.norm(want))
    return float(np.linalg.norm(got - want)) / norm if norm else np.inf


def _row_error(got: np.ndarray, want: np.ndarray) -> float:
    """Compute the error of the worst row; for arrays without rows, of the whole."""
    return float(_row_errors(got, want).max(initial=0.0)) if want.ndim > 1 else 0.0


def _row_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    size = np.maximum(np.linalg.norm(want, axis=-1), want.shape[-1] ** 0.5)
    return np.linalg.norm(got - want, axis=-1) / size


def _where(got: np.ndarray, want: np.ndarray, tolerance: float) -> str:
    """Describe the rows with large errors, if they are few."""
    if want.ndim < 2:
        return ""
    errors = _row_errors(got, want).reshape(-1)
    far = np.flatnonzero(errors > BY_ROW * tolerance)
    if not 0 < len(far) <= len(errors) / 4:
        return ""
    rows = f"row {far[0]}" if len(far) == 1 else f"{len(far)} rows from {far[0]} to {far[-1]}"
    return f"; {rows} of {len(errors)}"


def _bad(y: np.ndarray) -> str:
    """Count the non-finite values, and give the first index."""
    bad = ~np.isfinite(y)
    place = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"{int(bad.sum())} of {y.size} values NaN or infinite, the first at {place}"
