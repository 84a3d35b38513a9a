"""Tests that every benchmark with a result file has the same options for name, folder and commit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.command import measuring, written
from benchmarks.environment import RESULTS


def test_the_result_goes_where_it_is_asked_for(tmp_path: Path) -> None:
    options = measuring("about", "trial")
    assert options.parse_args([]).out == RESULTS
    asked = ["--name", "another", "--out", str(tmp_path / "new"), "--commit", "abc"]
    path = written(options.parse_args(asked), {"seconds": 1.5})
    assert path == tmp_path / "new" / "another.json"
    document = json.loads(path.read_text())
    assert (document["benchmark"], document["environment"]["commit"]) == ("another", "abc")
    assert document["figures"] == {"seconds": 1.5}


def test_an_option_is_spelt_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        measuring("about", "trial").parse_args(["--com", "abc"])
    assert "--com" in capsys.readouterr().err
