"""Tests of docs/python.md and its notebook: all cells are executed in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import notebook

SENTENCE = "It was a dark and stormy night; the rain fell in torrents, number {}.\n"


def test_the_notebook_is_the_page() -> None:
    assert notebook.NOTEBOOK.read_text("utf-8") == notebook.notebook_of(
        notebook.PAGE.read_text("utf-8")
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_the_notebook_runs(
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    document = json.loads(notebook.NOTEBOOK.read_text("utf-8"))
    code = ["".join(c["source"]) for c in document["cells"] if c["cell_type"] == "code"]
    (tmp_path / "my_texts").mkdir()
    for part in range(40):
        text = "".join(SENTENCE.format(part * 20 + n) for n in range(20))
        (tmp_path / "my_texts" / f"{part:02d}.txt").write_text(text)
    (tmp_path / "held_out.txt").write_text("".join(SENTENCE.format(n) for n in range(900, 920)))
    script = "\n".join(code).replace('"tiny", ', f'"tiny", **{{"file": "{backend}.toml"}}, ')
    (tmp_path / f"{backend}.toml").write_text(f'backend = "{backend}"\ndevice = "cpu"\n')
    exec(compile(script, "python.ipynb", "exec"), {})
    out, err = capfd.readouterr()
    assert "train.steps" in out  # the nearest name
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert "Warning" not in err
