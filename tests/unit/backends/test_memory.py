"""Tests that every framework's out-of-memory error becomes minillm's."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from minillm_core.backends.memory import memory, memory_or_error, process_peak
from minillm_core.errors import OutOfMemory


@pytest.mark.parametrize("size", [1 << 46, (1 << 61) - 1])
def test_what_no_cpu_can_hold_is_out_of_memory(size: int) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(OutOfMemory) as refused, memory_or_error():
        torch.empty(size)
    assert refused.value.exit_code == 6
    assert refused.value.what
    assert refused.value.fix


def test_mlx_s_words_are_known() -> None:  # it may end the process instead of raising
    with pytest.raises(OutOfMemory), memory_or_error():
        raise RuntimeError("[malloc] Unable to allocate 281474976710656 bytes.")


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), memory_or_error():
        raise RuntimeError("shapes differ")


def test_the_peak_is_the_process_s_and_never_falls() -> None:
    before = process_peak()
    assert before is not None
    # Enough to raise the peak after any earlier tests of this process, and 64 MiB.
    size = max(before - psutil.Process().memory_info().rss, 0) + (1 << 26)
    held = np.ones(size, np.uint8)
    peak = process_peak()
    del held
    assert peak is not None
    assert before < peak  # and the kernel counts in batches, so that it may fall slightly
    assert process_peak() == pytest.approx(peak, rel=0.02)
    assert peak < memory()
    assert peak >= psutil.Process().memory_info().rss / 2


@pytest.mark.skipif(sys.platform == "win32", reason="it has no getrusage")
def test_the_peak_is_known_without_proc(tmp_path: Path) -> None:
    other, usual = process_peak(tmp_path / "none"), process_peak()
    assert other is not None
    assert usual is not None
    assert 0.5 < other / usual < 2
