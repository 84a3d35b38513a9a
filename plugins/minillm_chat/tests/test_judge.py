"""Answers are evaluated by their loss, by a pattern, and by whether they reach an end of turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minillm_core as minillm
from minillm_chat.judge import judge_chats, part_of
from minillm_chat.talk import ChatModel
from minillm_core import DataError
from minillm_core.cli.main import main


@pytest.mark.parametrize(
    ("answer", "pattern", "part"),
    [
        (" 42 \n", None, "42"),
        ("2 + 2 = 4\n#### 4", r"#### (.+)", "4"),
        ("#### 3\n#### 4 ", r"#### (.+)", "4"),
        ("4", r"#### (.+)", None),
        ("a yes", r"yes|no", "yes"),
        ("x", r"(y)|x", "x"),
    ],
)
def test_the_part_that_is_compared(answer: str, pattern: str | None, part: str | None) -> None:
    assert part_of(answer, pattern and re.compile(pattern)) == part


@pytest.fixture
def chats(tmp_path: Path) -> Callable[..., str]:
    def write(answers: Sequence[str | None]) -> str:
        path = tmp_path / "held_out.jsonl"
        lines = [
            {"prompt": "Why?", "completion": one}
            if one is not None
            else {"messages": [{"role": "user", "content": "Why?"}]}
            for one in answers
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    return write


class Silent:
    """A display without a screen that collects the printed lines."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def phase(self, name: str) -> Any:
        from contextlib import nullcontext

        return nullcontext()


class Drawn(list[str]):
    """A stand-in for a stream of generated text."""

    def __init__(self, text: str, ended: bool = True) -> None:
        super().__init__([text])
        self.ended = ended


def test_what_is_right_is_counted(
    trained: Any, chats: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = minillm.Run.open(trained())
    said = iter([("so: 4", True), ("so: 5", True), ("4", False), ("so: 6", False)])

    def stream(prompt: list[int], **more: Any) -> Drawn:
        assert more["ends"] == ChatModel.of(run).ends
        assert more["temperature"] == 0
        assert 1 <= more["max_tokens"] <= 64
        return Drawn(*next(said))

    monkeypatch.setattr(run, "stream", stream)
    path, shown = (
        chats(["so: 4", "so: 4", "so: 4", "4", None, "so: 6", "so: 4" + "?" * 64]),
        Silent(),
    )
    found = judge_chats(run, [path], shown, pattern="so: (.)")
    assert {key: found[key] for key in ("chats", "left_out")} == {"chats": 4, "left_out": 3}
    assert shown.said == [
        "note: left out: 1 chat longer than a row (train.seq_len)",
        "note: left out: 1 chat whose own answer lacks the pattern",
        "note: left out: 1 chat without an answer",
    ]
    assert (found["exact_match"], found["format_rate"], found["ended_rate"]) == (0.5, 0.75, 0.5)


def test_the_loss_is_that_of_each_chat_s_answers_alone(
    trained: Any, chats: Callable[..., str]
) -> None:
    """Laid end to end, as text is evaluated, rows would cut the question off an answer."""
    run, answers = minillm.Run.open(trained()), ["So. " * 30, "So.", "It is so, my friend."] * 3
    model, nats = ChatModel.of(run), list[float]()
    question: list[Any] = [{"role": "user", "content": "Why?"}]
    longest = run.plan.config.train.seq_len
    for content in answers:
        whole = model.ids(
            model.template.parts([*question, {"role": "assistant", "content": content}])
        )
        first = len(model.ids(model.template.prompt(question)))
        end = whole.index(model.ends[0], first)
        for start in range(0, end, longest):
            row = whole[start : start + longest + 1]
            logits = run.logits(row[:-1]).astype(float)
            lost = np.log(np.exp(logits).sum(1)) - logits[range(len(row) - 1), row[1:]]
            nats += [one for at, one in enumerate(lost, start + 1) if first <= at <= end]
    found = judge_chats(run, [chats(answers)], Silent(), limit=2)
    assert found["answer_loss"] == pytest.approx(np.mean(nats), rel=1e-5)
    assert found["tokens"] == len(nats) > 3 * longest
    assert found["chats"] == 2


def test_an_answer_is_compared_with_what_the_template_writes(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model generates the reasoning too: with it an answer is no other one."""
    run, path = minillm.Run.open(trained()), tmp_path / "held_out.jsonl"
    thought = {"role": "assistant", "content": "It is.", "reasoning_content": "Is it?"}
    lines = [
        json.dumps({"messages": [{"role": "user", "content": "Why?"}, {**thought, "weight": one}]})
        for one in (1, 0)
    ]
    path.write_text("\n".join(lines))
    written = "<think>\nIs it?\n</think>\n\nIt is."
    monkeypatch.setattr(run, "stream", lambda prompt, **more: Drawn(written))
    assert judge_chats(run, [str(path)], Silent())["exact_match"] == 1
    path.write_text(lines[1])
    with pytest.raises(DataError, match="no chat to judge: every answer has weight 0"):
        judge_chats(run, [str(path)], Silent())


def test_what_cannot_be_measured_is_counted_or_refused_before_the_first_answer(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path, shown = minillm.Run.open(trained()), tmp_path / "held_out.jsonl", Silent()
    monkeypatch.setattr(run, "stream", lambda prompt, **more: Drawn("So."))
    answer = {"role": "assistant", "content": "", "thinking": "So."}  # unknown to chatml
    chats = [{"messages": [{"role": "user", "content": "Why?"}, answer]}]
    chats.append({"prompt": "Why?", "completion": "So."})
    path.write_text("".join(json.dumps(one) + "\n\n" for one in chats))
    found = judge_chats(run, [str(path)], shown)
    assert (found["chats"], found["left_out"], found["exact_match"]) == (1, 1, 1)
    refused = "1 chat that the template refuses, the template leaves out an answer, its thinking"
    assert shown.said == ["note: left out: blank lines: 2", f"note: left out: {refused}"]
    monkeypatch.setattr(run, "stream", None)
    path.write_text(path.read_text() + "{")
    with pytest.raises(DataError, match="not a line of JSON"):
        judge_chats(run, [str(path)], shown)


def test_answers_that_are_cut_are_counted_and_may_be_longer(
    trained: Any, chats: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(trained()), "--chats", chats(["So."] * 3)]
    assert main([*words, "--max-tokens", "2", "--limit", "1"]) == 0
    assert (
        "note: 1 answer was cut after 2 tokens: --max-tokens allows more" in capsys.readouterr().err
    )
    assert main([*words, "--max-tokens", "3"]) == 0
    assert "note: 3 answers were cut after 3 tokens: " in capsys.readouterr().err
    assert main(words) == 0  # as long as the row
    assert "cut" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "one of --data, --chats and --tasks"),
        (("--data", "a", "--chats", "b"), "one of --data, --chats and --tasks"),
        (("--data", "a", "--pattern", "b"), "--pattern has no effect"),
        (("--chats", "a", "--seq-len", "8"), "--seq-len has no effect"),
        (("--chats", "CHATS", "--pattern", "("), "not a regular expression"),
        (("--chats", "CHATS", "--pattern", "never"), "no chat to judge"),
        (("--chats", "/nowhere"), "no such file"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    trained: Any,
    chats: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    path = chats(["Because it is so, my friend."] * 30)
    code = main(["eval", str(trained()), *(path if word == "CHATS" else word for word in words)])
    err = capsys.readouterr().err
    assert (code, said in err) == (2, True), err


def test_an_answer_may_fill_the_row_of_its_question(trained: Any, tmp_path: Path) -> None:
    run, path, shown = minillm.Run.open(trained()), tmp_path / "held_out.jsonl", Silent()
    model, answer = ChatModel.of(run), "It is"
    assert run.tokenizer is not None
    tokens = len(run.tokenizer.encode([answer])[0]) + 1

    def used(marks: int) -> int:
        asked = [{"role": "user", "content": "?" * marks}]
        return len(model.ids(model.template.prompt(asked)))

    most = run.plan.config.train.seq_len - used(0) - tokens
    assert used(most) == used(0) + most  # each is a token
    lines = [
        json.dumps({"prompt": "?" * marks, "completion": answer}) + "\n"
        for marks in (1, most, most + 1, 99)
    ]
    path.write_text("".join(lines))
    found = judge_chats(run, [str(path)], shown)
    assert (found["chats"], found["left_out"]) == (2, 2)
    assert shown.said == ["note: left out: 2 chats longer than a row (train.seq_len)"]
    path.write_text("".join(lines[2:]))
    with pytest.raises(DataError, match="no chat to judge: 2 chats longer than a row"):
        judge_chats(run, [str(path)], shown)


def test_the_command_prints_the_figures(
    trained: Any, chats: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = chats(["Because it is so, my friend."] * 30)
    words = ["eval", str(trained()), "--chats", path, "--limit", "1"]
    assert main(words) == 0
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == lines.keys() | {"step", "checkpoint"}
    assert float(lines["answer_loss"]) == pytest.approx(found["answer_loss"], abs=1e-4)
    assert lines["chats"] == "1"


def test_a_run_that_knows_no_chats_is_refused(
    trained: Any, chats: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = chats(["so"] * 30)
    assert main(["eval", str(trained(plugins=None)), "--chats", path]) == 2
    assert "was not trained on chats" in capsys.readouterr().err


INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
    "{{ m.content }}[END]{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("more", "other"),
    [
        ({"sft__template": "chatml"}, False),
        ({"sft__template": "plain"}, False),
        ({"sft__template": "chatml"}, True),
        ({"sft__template": INST, "sft__tokens": ["[INST]", "[/INST]", "[END]"]}, False),
    ],
)
def test_an_exported_directory_has_the_figures_of_its_run(
    trained: Any,
    other_boundary: Any,
    chats: Callable[..., str],
    tmp_path: Path,
    more: dict[str, Any],
    other: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = trained(**more, **(other_boundary() if other else {}))
    path = chats(["Because it is so, my friend."] * 4)
    assert main(["export", str(run), "--to", str(tmp_path / "model")]) == 0
    found = []
    for place in (run, tmp_path / "model"):
        capsys.readouterr()
        assert main(["eval", str(place), "--chats", path, "--pattern", "is (.)", "--json"]) == 0
        figures = json.loads(capsys.readouterr().out)
        found.append({k: v for k, v in figures.items() if k not in ("step", "checkpoint")})
    of_run, of_directory = found
    assert of_directory == pytest.approx(of_run, rel=1e-5)
    assert of_run["tokens"] > 0
    (judged,) = [
        one
        for one in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if one["event"] == "judged"
    ]
    assert judged["judge"] == "chats"
    assert judged["figures"]["answer_loss"] == pytest.approx(of_run["answer_loss"])


def test_a_directory_without_a_template_is_refused(
    trained: Any, chats: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained(plugins=None)), "--to", str(tmp_path / "model")]) == 0
    assert main(["eval", str(tmp_path / "model"), "--chats", chats(["so"] * 30)]) == 2
    assert "no chat template" in capsys.readouterr().err
