"""Tests of the output streams of ``minillm generate``, and of interruptions."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minillm_core.errors import NonFinite
from minillm_core.train.generate import Sampling

Program = Callable[..., tuple[int, str, str]]


class Writing:
    """A replacement of a run's generator: yields some pieces, and records its calls."""

    def __init__(self) -> None:
        self.opened: dict[str, Any] = {}
        self.asked: dict[str, Any] = {}
        self.pieces: list[Any] = [" upon", " a", " time"]

    def open(self, out: Path, **options: Any) -> Any:
        self.opened = {"out": out, **options}
        path = Path("run/checkpoints/step-00000007")
        return SimpleNamespace(writer=lambda: self, step=7, checkpoint=path)

    def generate(self, prompt: str, sampling: Sampling, **options: Any) -> Any:
        self.asked = {"prompt": prompt, "sampling": sampling, **options}
        return SimpleNamespace(ids=[1, 2, 3], ended=True)

    def text(self, generation: Any, prompt: str = "") -> Iterator[str]:
        yield prompt
        for piece in self.pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield piece


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Writing:
    made = Writing()
    monkeypatch.setattr("minillm_core.train.run.Run.open", made.open)
    return made


def test_stdout_is_the_prompt_and_what_follows_it(program: Program, writing: Writing) -> None:
    assert program("generate", "run", "Once", "--seed", "5") == (0, "Once upon a time\n", "")
    assert writing.opened["out"] == Path("run")
    assert {key: writing.opened[key] for key in ("backend", "device", "plugins")} == {
        **{"backend": "auto", "device": "auto", "plugins": None}
    }
    asked = {key: writing.asked[key] for key in ("prompt", "sampling", "tokens", "seed", "cached")}
    assert asked == {
        **{"prompt": "Once", "sampling": Sampling(0.8, None, 1.0), "tokens": 256},
        **{"seed": 5, "cached": True},
    }


def test_what_is_asked_for_is_handed_over(program: Program, writing: Writing) -> None:
    drawing = ("--temperature", "0.5", "--top-k", "9", "--top-p", "0.9", "--max-tokens", "3")
    machine = ("--backend", "mlx", "--device", "cpu", "--plugins", "./trick.py:Trick")
    assert program("generate", "run", "--seed", "1", *drawing, *machine, "--no-cache")[0] == 0
    assert writing.asked["sampling"] == Sampling(0.5, 9, 0.9)
    assert (writing.asked["prompt"], writing.asked["tokens"]) == ("", 3)
    assert not writing.asked["cached"]
    assert (writing.opened["backend"], writing.opened["device"]) == ("mlx", "cpu")
    assert writing.opened["plugins"] == "./trick.py:Trick"


def test_a_seed_is_made_and_said(program: Program, writing: Writing) -> None:
    seeds = set()
    for _ in range(2):
        code, _, err = program("generate", "run")
        assert (code, err) == (0, f"drawn with --seed {writing.asked['seed']}\n")
        seeds.add(writing.asked["seed"])
    assert len(seeds) == 2
    assert program("generate", "run", "--temperature", "0")[2] == ""


def test_one_document_on_request(program: Program, writing: Writing) -> None:
    code, out, _ = program("generate", "run", "Once", "--json", "--seed", "5")
    assert code == 0
    assert json.loads(out) == {
        **{"prompt": "Once", "text": " upon a time", "ids": [1, 2, 3], "ended": True, "seed": 5},
        **{"step": 7, "checkpoint": "run/checkpoints/step-00000007"},
    }


def test_a_prompt_from_stdin(program: Program, writing: Writing, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Ünce\n".encode())))
    assert program("generate", "run", "-", "--seed", "1")[1] == "Ünce\n upon a time\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    code, out, err = program("generate", "run", "-")
    assert (code, out) == (2, "")
    assert "the prompt is not UTF-8" in err
    assert "stdin" in err
    assert "at 2" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a\udcff"], "the prompt is not UTF-8"),
        (["--temperature", "-1"], "temperature cannot be -1.0"),
        (["--top-k", "0"], "top_k cannot be 0"),
        (["--top-p", "1.5"], "top_p cannot be 1.5"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(
    program: Program, writing: Writing, arguments: list[str], said: str
) -> None:
    code, out, err = program("generate", "run", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert writing.opened == {}  # before anything is read


def test_an_interrupt_ends_the_line(program: Program, writing: Writing) -> None:
    writing.pieces[1] = KeyboardInterrupt()
    code, out, err = program("generate", "run", "Once", "--seed", "1")
    assert (code, out) == (130, "Once upon\n")
    assert err == "interrupted: the text ends here\n"


def test_an_error_ends_the_line(program: Program, writing: Writing) -> None:
    writing.pieces[1] = NonFinite("the logits are not finite")
    code, out, err = program("generate", "run", "Once", "--seed", "1")
    assert (code, out, err) == (5, "Once upon\n", "the logits are not finite\n")


def test_what_stdout_cannot_spell_is_replaced(writing: Writing, monkeypatch) -> None:
    from minillm_core.cli.main import main

    writing.pieces = ["\u00fc", "\U0001f600"]
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    assert main(["generate", "run", "--seed", "1"]) == 0
    assert raw.getvalue() == b"\xfc?\n"
