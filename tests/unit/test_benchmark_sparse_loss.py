"""Tests that the sparse-loss benchmark measures each file with each kind of rows, and survives a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("minillm_chat")

from benchmarks.sparse_loss import main

SIZES = ("model.layers=1", "model.dim=32", "model.heads=2", "model.kv_heads=2", "model.vocab=300")


@pytest.mark.slow
def test_every_pair_is_measured_and_a_failure_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chats, none = tmp_path / "chats.jsonl", tmp_path / "none.jsonl"
    lines = ({"prompt": "And so? " * (n % 5 + 1), "completion": "It is."} for n in range(90))
    chats.write_text("".join(json.dumps(line) + "\n" for line in lines))
    none.write_text('{"prompt": "An answer is missing"}\n' * 9)
    sizes = [
        word for one in (*SIZES, "train.seq_len=32", "train.rows=4") for word in ("--set", one)
    ]
    flags = ["--preset", "tiny", "--steps", "1", "--repeats", "1", "--rows", "packed,bucketed"]
    folders = ["--out", str(tmp_path), "--cache", str(tmp_path / "cache")]
    command = ["sparse_loss", str(chats), str(none), *flags, *sizes, *folders]
    monkeypatch.setattr("sys.argv", command)
    main()
    document = json.loads((tmp_path / "sparse_loss.json").read_text())
    assert set(document) == {"benchmark", "command", "environment", "figures"}
    assert str(tmp_path) not in json.dumps(document["command"])
    first, second, *failed = document["figures"]["pairs"]
    for one in (first, second):
        sparse, dense = one["sets"]["sparse"], one["sets"]["dense"]
        assert one["data"] == "chats.jsonl"
        assert 0 < sparse["supervised_share"] == dense["supervised_share"] < 0.6
        speeds = sparse["tokens_per_second"], dense["tokens_per_second"]
        assert one["ratio"]["tokens_per_second"] == pytest.approx(speeds[0] / speeds[1])
    assert [one["rows"] for one in (first, second)] == ["packed", "bucketed"]
    assert ["no conversation" in one["failed"] for one in failed] == [True, True]
    said = capsys.readouterr().out
    assert "chats.jsonl, packed: " in said
    assert "none.jsonl, bucketed: FAILED" in said
