"""Tests of transposed copies on a replacement of Triton that checks every access."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def module(kernels: Any) -> Any:
    """Load the kernel with tiles of 4."""
    found = kernels("transpose")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found, "SIDE", 4)
        yield found


def check(module: Any, n: int, m: int, more: int) -> None:
    x = torch.arange(n * m, dtype=torch.int32).remainder(255).add(1).to(torch.uint8).view(n, m)
    out = torch.full((m, n + more), 255, dtype=torch.uint8)
    module.transpose(x, out)
    assert torch.equal(out[:, :n], x.T)
    assert not out[:, n:].any()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 13), st.integers(1, 13), st.integers(0, 9))
@example(8, 12, 0)  # whole tiles
@example(5, 3, 9)  # a tile of zeros only
def test_it_is_transposed_and_0_behind(module: Any, n: int, m: int, more: int) -> None:
    check(module, n, m, more)


# Faulty kernels: name -> (original code, replacement)
FAULTS = {
    "the tile is not transposed": ("tl.trans(tile)", "tile"),
    "it reads past the last row": ("(row[:, None] < n) & ", "(row[:, None] <= n) & "),
    "it reads past a row's end": (" & (column[None, :] < m)", " & (column[None, :] <= m)"),
    "it writes past a row's end": (" & (row[None, :] < wide)", " & (row[None, :] <= wide)"),
    "what stands behind is kept": (" & (row[None, :] < wide)", " & (row[None, :] < n)"),
    "rows of tiles are as long as columns": (
        "tiles = (m + side - 1) // side",
        "tiles = (wide + side - 1) // side",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_caught(kernels: Any, fault: str) -> None:
    wrong = kernels("transpose", *FAULTS[fault])
    wrong.SIDE = 4
    caught = 0
    for sizes in ((9, 6, 7), (5, 14, 0), (7, 7, 9)):
        try:
            check(wrong, *sizes)
        except AssertionError:  # a wrong value, or an invalid access
            caught += 1
    assert caught


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize(("n", "m"), [(8064, 50304), (300, 77), (1, 1)])
def test_a_gpu_transposes(n: int, m: int) -> None:
    from minillm_triton.kernels.fp8 import transposed

    x = torch.randint(0, 255, (n, m), device="cuda", dtype=torch.uint8)
    out = transposed(x)
    assert out.shape == (m, n + -n % 16)
    assert torch.equal(out[:, :n], x.T)
    assert not out[:, n:].any()
