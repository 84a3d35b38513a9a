"""Fixtures: tests that need the emulator are skipped without a compiler, with the reason."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def emulator() -> None:
    """Skip where kernels cannot be emulated. Imports MLX, after its BLAS is chosen."""
    from minillm_metal.emulator import compiler_reason

    if reason := compiler_reason():
        pytest.skip(reason)
