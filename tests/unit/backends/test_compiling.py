"""Tests of how torch.compile and SDPA are prepared: imports, garbage collection, attention's kernels."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from minillm_core.backends.bind import create_backend
from minillm_core.backends.detect import Detected

torch = pytest.importorskip("torch")


def test_full_collections_wait_for_the_end_of_a_compilation() -> None:
    from minillm_core.backends.torch.compiling import imported, importing

    torch.compiler.reset()  # which also forgets what to do before and after a compilation
    importing.cache_clear()
    usual, during = gc.get_threshold(), []

    def backend(graph: Any, inputs: Any) -> Any:
        during.append(gc.get_threshold())
        return graph.forward

    compiled = imported(torch.compile)(lambda x: x + 1, fullgraph=True, backend=backend)
    assert not importing().is_alive()
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert [one[:2] for one in during] == [usual[:2]]
    assert during[0][2] > 1000 * usual[2]
    assert gc.get_threshold() == usual


def test_inference_uses_no_kernel_that_is_prepared_for_each_length(plan_of: Any) -> None:
    """A sample has a new length at every token, for which cuDNN's attention needs a tenth of a second."""
    plan, cuda = plan_of(), torch.backends.cuda
    model: Any = create_backend(Detected("torch", "cpu", "test"), plan).model(plan, 0)
    before = cuda.cudnn_sdp_enabled()
    with model.inferring():
        assert not cuda.cudnn_sdp_enabled()
        assert cuda.flash_sdp_enabled()
        assert cuda.mem_efficient_sdp_enabled()
        assert cuda.math_sdp_enabled()
    assert cuda.cudnn_sdp_enabled() == before
