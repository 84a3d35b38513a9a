"""Conformance tests of this distribution's plugins; tests that need Metal are skipped without it."""

from __future__ import annotations

import pytest

from minillm_kit import conformance

pytestmark = pytest.mark.slow

test_metal = conformance("metal")
