"""Tests of the commands' calls of the implementing functions, and of the display of results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minillm_core.train.events import Evaluated

Program = Callable[..., tuple[int, str, str]]


class Spy:
    """Records its calls."""

    def __init__(self, result: Any = None) -> None:
        self.result = result
        self.arguments: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.arguments, self.named = arguments, named
        return self.result


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_CACHE", "/cache")


def test_a_home_that_no_shell_expands(program: Program, monkeypatch) -> None:
    spy = Spy()
    monkeypatch.setattr("minillm_core.train.request.train", spy)
    monkeypatch.setenv("MINILLM_CACHE", "~/cache")
    assert program("train", "--out=~/here", "--preset", "tiny")[0] == 0
    assert (spy.named["out"], spy.named["cache"]) == (Path.home() / "here", Path.home() / "cache")


def test_train_hands_over_what_was_asked(program: Program, monkeypatch) -> None:
    spy = Spy()
    monkeypatch.setattr("minillm_core.train.request.train", spy)
    arguments = ("--steps", "3", "--out", "here", "--data", "a", "--data", "b", "--deterministic")
    assert program("train", *arguments, "train.lr=1", "model.vocab=512", "--preset", "tiny")[0] == 0
    (prepared,) = spy.arguments
    loaded, plugins, detected = prepared.loaded, prepared.plugins, prepared.detected
    assert (loaded.config.train.steps, loaded.config.train.lr) == (3, 1.0)
    assert loaded.config.data.paths == (str(Path("a").absolute()), str(Path("b").absolute()))
    assert loaded.config.deterministic
    assert loaded.origins["deterministic"] == "--deterministic"
    assert plugins == ()
    assert detected.backend in ("torch", "mlx")
    assert spy.named["out"] == Path("here")
    assert spy.named["cache"] == Path("/cache")


class Opened:
    """A replacement of an opened run folder: returns results, and records its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, result: Any) -> None:
        self.open, self.evaluate, self.export = Spy(self), Spy(result), Spy(result)
        self.checkpoint, self.step = Path("c"), 3
        monkeypatch.setattr("minillm_core.train.run.Run.open", self.open)


def test_eval_hands_over_what_was_asked(program: Program, monkeypatch) -> None:
    run = Opened(monkeypatch, Evaluated(3, 1.25, 0.5, 1234))
    code, out, _ = program("eval", "run", "--data", "a", "--seq-len", "7", "--max-tokens", "9")
    assert code == 0
    assert out == "val_loss       1.2500\nbits_per_byte  0.5000\ntokens         1,234\n"
    assert run.open.arguments == (Path("run"),)
    assert run.evaluate.arguments == (["a"],)
    assert run.evaluate.named == {"seq_len": 7, "max_tokens": 9}


@pytest.mark.parametrize("loss", [1.25, float("nan")])
def test_eval_writes_one_document(program: Program, monkeypatch, loss: float) -> None:
    Opened(monkeypatch, Evaluated(3, loss, None, 1234))
    code, out, _ = program("eval", "run", "--data", "a", "--json")
    assert code == 0
    assert json.loads(out) == {
        **{"val_loss": 1.25 if loss == 1.25 else None, "bits_per_byte": None},
        **{"tokens": 1234, "step": 3, "checkpoint": "c"},
    }


def test_eval_says_that_there_is_no_tokenizer(program: Program, monkeypatch) -> None:
    Opened(monkeypatch, Evaluated(3, 1.25, None, 1234))
    assert "bits_per_byte  unknown: no tokenizer" in program("eval", "run", "--data", "a")[1]


WRITTEN = {
    **{"directory": "to", "layout": "llama", "parameters": 1234, "step": 3, "checkpoint": "c"},
    "files": {"config.json": 12, "model.safetensors": 123456},
    "loading": {"a program": "open to", "another": "read to"},
}


def test_export_hands_over_what_was_asked(program: Program, monkeypatch) -> None:
    run = Opened(monkeypatch, WRITTEN)
    code, out, err = program("export", "run", "--to", "to", "--plugins", "./a.py:A")
    assert (code, err) == (0, "")
    assert run.open.arguments == (Path("run"),)
    assert run.open.named["plugins"] == "./a.py:A"
    assert (run.export.arguments, run.export.named) == (
        (Path("to"),),
        {"dtype": "float32", "layout": None},
    )
    for said in ("llama", "1,234", "after step 3", "123,456 bytes", "a program     open to"):
        assert said in out
    assert json.loads(program("export", "run", "--to", "to", "--json")[1]) == WRITTEN
    assert "in bfloat16" in program("export", "run", "--to", "to", "--dtype", "bfloat16")[1]
    assert run.export.named == {"dtype": "bfloat16", "layout": None}
    program("export", "run", "--to", "to", "--layout", "peft")
    assert run.export.named == {"dtype": "float32", "layout": "peft"}


def test_export_says_nothing_of_loading_where_a_format_does_not(
    program: Program, monkeypatch
) -> None:
    Opened(monkeypatch, WRITTEN | {"loading": {}})
    assert "load it with" not in program("export", "run", "--to", "to")[1]


def test_a_plan_is_one_document(program: Program) -> None:
    code, out, err = program("plan", "--json")
    assert code == 0
    document = json.loads(out)
    assert set(document) == {"plan", "plan_hash", "plugins", "export", "settings", "costs"}
    assert document["plugins"] == []
    assert "preset" in err  # the machine's choice is printed, but not on stdout


def test_two_plans_are_one_document(program: Program, tmp_path: Path) -> None:
    (tmp_path / "trick.py").write_text(
        "from minillm_core.plugins.plugin import Plugin\n\n\n"
        "class Trick(Plugin, api=1):\n"
        '    """Watches."""\n\n'
        "    def on_event(self, event):\n        pass\n"
    )
    trick = f"{tmp_path}/trick.py:Trick"
    code, out, err = program("plan", "--json", "--diff", "", trick)
    assert code == 0
    assert err.count("preset") == 1
    document = json.loads(out)
    plain, with_trick = document["plans"]
    assert document["difference"]["plugins"] == [[], ["trick"]]
    assert plain["plan_hash"] != with_trick["plan_hash"]
    assert [one["name"] for one in with_trick["plugins"]] == ["trick"]


def test_info_shows_options_and_slots(program: Program, tmp_path: Path) -> None:
    (tmp_path / "trick.py").write_text(
        "from minillm_core.plugins.options import option\n"
        "from minillm_core.plugins.plugin import Plugin\n\n\n"
        "class Trick(Plugin, api=1):\n"
        '    """Watches."""\n\n'
        '    often: int = option(3, ge=1, help="how often")\n\n'
        "    def on_event(self, event):\n        pass\n"
    )
    code, out, _ = program("plugins", "info", f"{tmp_path}/trick.py:Trick", "--json")
    assert code == 0
    document = json.loads(out)
    assert [(one["name"], one["default"]) for one in document["options"]] == [("often", 3)]
    assert document["slots"] == ["on_event: events"]


def test_info_on_an_unknown_preset_is_refused(program: Program) -> None:
    code, _, err = program("plugins", "info", "muon", "--preset", "tinny")
    assert code == 2
    assert "there is no preset 'tinny'" in err
