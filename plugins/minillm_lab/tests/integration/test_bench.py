"""Tests of ``minillm bench`` through the program, on the installed frameworks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minillm_core.cli.main import main

SMALL = (
    *("model.vocab=300", "model.dim=32", "model.layers=2", "model.heads=2", "model.kv_heads=2"),
    *("model.hidden=32", "train.rows=2", "train.seq_len=16", "--preset", "tiny"),
    *("--steps", "2", "--repeats", "2"),
)


@pytest.fixture
def given(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"the {n} little cats sat on mat {n * n}" for n in range(400)))
    return ("--data", str(path), "--device", "cpu", "--backend", "torch", *SMALL)


def test_two_sets_are_compared_with_layers_and_a_trace(
    given: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    command = ["bench", "--plugins", "muon,sparse_gate", "--against", "none", *given]
    options = ["--layers", "--trace", str(trace), "muon.lr=0.01", "--json"]
    assert main([*command, *options]) == 0
    result = json.loads(capsys.readouterr().out)
    ours, plain = result["sets"]["muon+sparse_gate"], result["sets"]["plain"]
    assert ours["plugins"][0]["options"]["lr"] == 0.01
    assert plain["plugins"] == []
    assert set(plain["shares"]) == {"data", "forward", "backward", "optimizer"}
    assert sum(plain["shares"].values()) == pytest.approx(1)
    assert list(ours["layers"]) == ["embedding", "layers.0", "layers.1", "head and loss"]
    for spent in ours["layers"].values():
        assert min(spent.values()) > 0
    (path,) = ours["traces"]
    names = {event.get("name") for event in json.loads(Path(path).read_bytes())["traceEvents"]}
    assert {"forward", "backward", "optimizer", "layers.0", "layers.1.attention"} <= names
    assert any(name.endswith("sparse_gate") for name in names if name)


def test_a_table_is_shown(given: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *given]) == 0
    shown = capsys.readouterr()
    assert "tokens/s" in shown.out
    assert "plain" in shown.out
    assert "peak" in shown.out


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--repeats", "0"], "nothing would be timed"),
        (["--against", ""], "--against names nothing"),
        (["--against", "no_such_plugin"], "no plugin 'no_such_plugin'"),
        (["--trace", "no_such_folder/t.json"], "is not a folder"),
        (["--backend", "mlx", "--trace", "t.json"], "no trace that Perfetto opens"),
        (["--backend", "mlx", "--layers"], "how long a layer takes"),
        (["train.no_such_setting=1"], "no_such_setting"),
    ],
)
def test_wrong_input_is_refused(
    given: tuple[str, ...],
    wrong: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "mlx" in wrong:
        pytest.importorskip("mlx")
        given = tuple("mlx" if one == "torch" else one for one in given)
        given = tuple("gpu" if one == "cpu" else one for one in given)
        given = tuple(one for one in given if one not in ("--device", "gpu"))
        wrong = wrong[2:]
    assert main(["bench", *given, *wrong]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "trained on this text" not in said
