"""Tests of how torch.compile and SDPA are prepared: imports, attention's kernels."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from minillm_core.backends.bind import create_backend
from minillm_core.backends.detect import Detected

torch = pytest.importorskip("torch")


def test_a_compiler_waits_for_the_imports() -> None:
    from minillm_core.backends.torch.compiling import imported, importing

    importing.cache_clear()
    imported(lambda function, **_: function)(len)
    assert not importing().is_alive()
    assert "torch._inductor.compile_fx" in sys.modules


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
