"""docs/chat.md, executed from beginning to end."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from minillm_core.cli.main import main

PAGE = Path(__file__).parents[3] / "docs" / "chat.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_page_goes_from_a_base_run_to_a_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make, talk = blocks("python")
    exec(compile(make, "chat.md", "exec"), {})
    commands = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
    assert [words[1] for words in commands] == ["train", "train", "eval", "chat"]
    question = b"What comes after 7?\nWhat comes after 120?\n"
    answers = ""
    for words in commands:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(question), "utf-8"))
        more = ["--json"] if words[1] == "eval" else []
        assert main([*words[1:], *more]) == 0
        out = capsys.readouterr().out
        if words[1] == "eval":
            found: dict[str, Any] = json.loads(out)
            assert found["format_rate"] >= 0.8
            assert found["ended_rate"] >= 0.8
            assert found["chats"] == 50
        answers = out
    assert answers.count("After") == 2
    assert answers.count("####") >= 2
    exec(compile(talk, "chat.md", "exec"), {})
    assert capsys.readouterr().out.strip() in answers


def test_the_page_says_what_is_said() -> None:
    """The messages in the page's last table are those of the code."""
    table = PAGE.read_text().partition("## What goes wrong")[2]
    root = PAGE.parents[1]
    sources = "".join(
        path.read_text()
        for folder in ("minillm_core", "plugins/minillm_chat/minillm_chat")
        for path in (root / folder).rglob("*.py")
    )
    for words in (
        'chat data: "',
        "the tokenizer has no special token",
        "lines without an answer",
        "lines whose chat is refused",
        "the template says:",
        "are longer than a row",
        "the run was not trained on chats",
        "the model directory has no chat template",
        "held-out loss has risen since step",
    ):
        assert words in table
        assert words in sources
