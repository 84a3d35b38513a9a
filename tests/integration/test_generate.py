"""Tests of training a run and continuing a prompt with it, on either framework."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minillm_core.cli.main import main

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

SETTINGS = {
    **{"model.vocab": 300, "model.dim": 32, "model.heads": 4, "model.kv_heads": 2},
    **{"model.layers": 2, "model.hidden": 48, "train.rows": 2, "train.seq_len": 16},
    **{"eval.tokens": 100, "eval.samples": 0, "train.compile": "off"},
}
TEXT = "It was a dark and stormy night; the räin fell in torrents. \U0001f600\n"


@pytest.fixture(scope="module", params=["torch", "mlx"])
def out(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run with every shipped plugin, and one of a single file that reads each batch."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text(TEXT * 200, "utf-8")
    (folder / "seen.py").write_text(
        "from minillm_core import Plugin\n\n\n"
        "class Seen(Plugin, api=1):\n"
        '    """Sees."""\n\n'
        "    def on_batch(self, batch, phase):\n        return batch\n",
        "utf-8",
    )
    given = [f"{key}={value}" for key, value in SETTINGS.items()]
    plugins = f"muon,paired_heads,{folder}/seen.py:Seen"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINILLM_CACHE", str(folder / "cache"))
        where = ["--data", str(folder / "text.txt"), "--out", str(folder / "out")]
        machine = ["--backend", request.param, "--device", "cpu"]
        code = main(["train", "--steps", "40", "--plugins", plugins, *where, *machine, *given])
    assert code == 0
    return folder / "out"


@pytest.mark.slow
def test_a_run_goes_on_with_a_prompt(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    again = ["--plugins", f"{out.parent}/seen.py:Seen"]
    texts, said = set(), set()
    for backend in ("torch", "mlx"):
        for more in ((), ("--no-cache",)):
            options = ["--temperature", "0", "--max-tokens", "40", "--backend", backend, *more]
            assert main(["generate", str(out), "It was", *options, "--device", "cpu", *again]) == 0
            stdout, stderr = capsys.readouterr()
            texts.add(stdout)
            said.add(stderr)
    assert len(texts) == 1
    assert said == {"the model sees 16 tokens at most: it continues from the last 8\n"}
    (text,) = texts
    assert text.startswith("It was")
    assert len(text) > 40

    options = ["--seed", "3", "--json", "--max-tokens", "5", *again]
    drawn = []
    for _ in range(2):
        assert main(["generate", str(out), "It", *options]) == 0
        drawn.append(json.loads(capsys.readouterr().out))
    assert drawn[0] == drawn[1]
    assert (drawn[0]["prompt"], drawn[0]["seed"], drawn[0]["step"]) == ("It", 3, 40)

    assert main(["generate", str(out), "It"]) == 2
    assert "must be named again" in capsys.readouterr().err
