"""The drawing, and the command through minillm's own program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from minillm_core.cli.main import main

from minillm_losses.losses import drawn


def test_a_drawing_falls_as_the_loss_does() -> None:
    assert drawn([3.0, 2.0, 1.0], 3) == "#~_"
    assert drawn([float(n) for n in range(100, 0, -1)], 7) == "#*=~-._"
    assert drawn([1.0], 60) == "_"


def test_the_command_draws_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [{"event": "step", "step": n, "loss": 4.0 - n} for n in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, events)))
    assert main(["losses", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"3.000 #~_ 1.000  {tmp_path}\n"
    assert main(["losses", str(tmp_path / "nowhere")]) == 2
    assert "holds no metrics of a run" in capsys.readouterr().err
