"""Tests of symmetric products on a replacement of Triton that checks every access."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minillm_core.ops.contract import CONTRACTS
from minillm_kit.reference import gram as reference

torch = pytest.importorskip("torch")

Case = tuple[int, int, int, int, float, bool, bool]  # N, R, C, seed, alpha, x and I added, turned
SMALL = {"TILES": {4: (4, 1)}, "DEPTH": 8}


@pytest.fixture(scope="module")
def module(kernels: Any) -> Any:
    """Load the kernel with small sizes: tiles of 4, products in pieces of 8."""
    found = kernels("gram")
    with pytest.MonkeyPatch.context() as patch:
        for name, small in SMALL.items():
            patch.setattr(found, name, small)
        yield found


def check(module: Any, case: Case) -> None:
    N, R, C, seed, alpha, added, turned = case
    x = np.random.default_rng(seed).standard_normal((N, R, C)).astype(np.float32)
    if added:
        x = x @ np.swapaxes(x, 1, 2)
    beta, gamma = (-4.775, 3.4445) if added else (0.0, 0.0)
    exact = reference(x, alpha, beta, gamma)
    given = torch.from_numpy(x)
    given = given.mT.contiguous().mT if turned else given
    got = module.gram(given, alpha, beta, gamma).double().numpy()
    limit = max(np.linalg.norm(exact), exact.size**0.5)
    assert np.linalg.norm(got - exact) <= CONTRACTS["gram"].tolerance["float32"] * limit
    np.testing.assert_array_equal(got, np.swapaxes(got, 1, 2))  # bitwise


CASES = st.tuples(
    st.integers(1, 3),
    st.integers(1, 13),
    st.integers(1, 19),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1.0, 2.0315]),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(CASES)
@example((2, 8, 16, 0, 1.0, False, False))  # whole tiles
@example((2, 9, 7, 1, 2.0315, True, True))
def test_it_keeps_its_contract(module: Any, case: Case) -> None:
    check(module, case)


# Faulty kernels: name -> (original code, replacement)
FAULTS = {
    "no mirror image": ("        if j < i:", "        if j < 0:"),
    "the mirror image is not turned": ("tl.trans(tile_made)", "tile_made"),
    "every program writes both": ("    if j <= i:", "    if j <= count:"),
    "the diagonal is left out": ("    if j <= i:", "    if j < i:"),
    "rows past the end": (
        "tl.store(made + here, tile_made, mask=inside)",
        "tl.store(made + here, tile_made)",
    ),
    "the inner tail is left out": ("range(0, C, depth)", "range(0, C - depth + 1, depth)"),
    "the inner tail reads the next row": (
        "& (inner < C)[None, :]",
        "& (inner < C + depth)[None, :]",
    ),
    "all matrices are the first": ("x += matrix * by_matrix", "x += matrix * 0"),
    "a transposed matrix is read by rows": (
        "rows[:, None] * by_row + inner[None, :] * by_column",
        "rows[:, None] * C + inner[None, :]",
    ),
    "what is added is not turned in": ("        if add:", "        if False:"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_caught(kernels: Any, fault: str) -> None:
    wrong = kernels("gram", *FAULTS[fault])
    for name, small in SMALL.items():
        setattr(wrong, name, small)
    caught = 0
    for added, turned in ((False, False), (True, False), (False, True)):
        try:
            check(wrong, (3, 9, 11, 0, 1.0, added, turned))
        except AssertionError:
            caught += 1
    assert caught
