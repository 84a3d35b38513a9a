"""Tests that the sparse-rows benchmark measures every variant, and reports the cost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("minillm_modded")

from benchmarks.sparse_rows import batch_of, cost, main, zipf
from benchmarks.turns import Measured


def test_ids_follow_zipfs_law() -> None:
    ids = zipf(100, (200, 101))
    assert ids.dtype == np.int32
    assert (ids.min(), ids.max()) == (0, 99)
    counts = np.bincount(ids.reshape(-1))
    assert 1.8 < counts[0] / counts[1] < 2.2
    batch = batch_of(ids)
    np.testing.assert_array_equal(batch["ids"][:, 1:], batch["labels"][:, :-1])


def test_a_cost_is_a_share_of_the_step_that_has_it() -> None:
    plain, other = (Measured(name, None, 1, 0.0) for name in ("plain", "other"))  # type: ignore[arg-type]
    plain.seconds, other.seconds = [[1.0, 1.0], [1.0]], [[1.25, 1.25], [2.0]]
    assert cost(plain, other) == {"cost": 0.2, "low": 0.2, "high": 0.5}


@pytest.mark.slow
def test_every_variant_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--tiny", "--tokens", "128", "--tables", "bigram_hash,absent", "--backend", "torch"]
    flags += ["--steps", "1", "--repeats", "2", "--set", "train.compile=off", "--preset", "tiny"]
    monkeypatch.setattr("sys.argv", ["sparse_rows", *flags, "--out", str(tmp_path)])
    main()
    (one,) = json.loads((tmp_path / "sparse_rows.json").read_text())["figures"]["sizes"]
    assert [*one["sets"]] == ["plain", "bigram_hash", "bigram_hash by rows"]
    assert [*one["failed"]] == ["absent", "absent by rows"]
    by_rows = one["sets"]["bigram_hash by rows"]
    (held,) = by_rows["rows_per_step"].values()
    assert 0 < held <= 128
    assert by_rows["low"] <= by_rows["cost"] <= by_rows["high"]
    said = capsys.readouterr().out
    assert "128 tokens, bigram_hash by rows: " in said
    assert "128 tokens, absent: FAILED" in said
