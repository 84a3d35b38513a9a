"""Conformance tests of this distribution's plugins; GPU tests are skipped without one."""

from __future__ import annotations

import pytest

from minillm_kit import conformance

pytestmark = pytest.mark.slow

test_cute = conformance("cute")
test_fused_relu2 = conformance("fused_relu2")
test_fused_swiglu = conformance("fused_swiglu")
