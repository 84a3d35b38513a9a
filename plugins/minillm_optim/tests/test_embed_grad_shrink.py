"""Test of the embedding's gradient: only the lookup's part is multiplied by alpha."""

from __future__ import annotations

import numpy as np
import pytest

from minillm_kit import one_step

ALPHA = 0.25


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_the_tables_gradient_is_shrunk_and_no_other(backend: str) -> None:
    pytest.importorskip("torch" if backend == "torch" else "mlx.core")
    shrunk, whole = (
        one_step("embed_grad_shrink", {"alpha": alpha}, backend=backend) for alpha in (ALPHA, 1.0)
    )
    none = one_step("embed_grad_shrink", {"alpha": 0.0}, backend=backend)
    assert shrunk.loss == whole.loss == none.loss
    np.testing.assert_array_equal(shrunk.hidden, whole.hidden)
    for name, gradient in whole.gradients.items():
        got, nothing = shrunk.gradients[name], none.gradients[name]
        if name == "embedding.weight":  # with alpha 0 a tied head's part remains
            want = nothing + ALPHA * (gradient - nothing)
            assert np.abs(gradient - nothing).max() > 1e-4
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-7)
        else:
            np.testing.assert_allclose(got, gradient, rtol=1e-5, atol=1e-8)
