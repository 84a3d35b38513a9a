"""The program, from the command line to the last line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minillm_sweep import sweep


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A text that takes a moment."""
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"{n} and {n + 1} are {2 * n + 1}" for n in range(4000)))
    return str(path)


def test_the_best_rate_has_the_lowest_loss(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["0.00001", "0.003", "--steps", "5", "--data", text]) == 0
    out = capsys.readouterr().out
    losses = [float(found) for found in re.findall(r"held-out loss (\S+)", out)]
    assert losses[1] < losses[0]
    assert out.endswith("best: lr 0.003\n")


def test_a_setting_that_is_refused_ends_it_with_minillm_s_exit_code(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.main(["-1", "--steps", "5", "--data", text]) == 2
    assert "train.lr" in capsys.readouterr().err
