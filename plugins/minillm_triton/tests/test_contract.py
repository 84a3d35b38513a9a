"""Conformance tests of this distribution's plugin; GPU tests are skipped without one."""

from __future__ import annotations

import pytest

from minillm_kit import conformance

pytestmark = pytest.mark.slow

test_fp8_head = conformance("fp8_head")
test_fp8_mlp = conformance("fp8_mlp")
test_triton = conformance("triton")
