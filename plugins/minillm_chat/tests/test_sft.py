"""Chats in files become documents with labels on the answers alone."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import minillm_core as minillm
from minillm_chat.chats import conversation, names_of, segments
from minillm_chat.talk import ChatModel
from minillm_chat.templates import ChatTemplate
from minillm_core import DataError
from minillm_core.cli.main import main
from minillm_core.data import Corpus, open_corpus
from minillm_core.documents import MalformedError, Place, Reading, Special, Tokenizer, find

SMALL = {
    "model.layers": 1,
    "model.dim": 32,
    "model.heads": 2,
    "model.vocab": 300,
    "train.seq_len": 64,
    "train.rows": 4,
    "train.steps": 2,
    "eval.samples": 0,
    "data.val": 0.2,
}
PLACE = Place(Path("chats.jsonl"), "", 1, 0)
QUESTION, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CHAT = {"messages": [QUESTION, ANSWER]}

Planned = Callable[..., minillm.Plan]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def written(records: Sequence[Any], name: str = "chats.jsonl") -> Path:
        path = tmp_path / name
        text = "".join(json.dumps(one) + "\n" for one in records).encode()
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return path

    return written


def read(path: Path, given: str = "chatml") -> tuple[list[str], Counter[str]]:
    """Return the documents of a file, with supervised spans in [[ ]], and the notes."""
    template = ChatTemplate.of(given)
    specials = list(names_of(template.specials).items())
    texts = {name: text for text, name in specials}
    reading = Reading(1 << 20)
    found = []
    for document in segments(
        find([str(path)], print),
        reading,
        source=template.source,
        specials=specials,
        variables=json.dumps(template.variables),
        day="2026-01-01",
    ):
        whole = ""
        for content, values in document:
            text = texts[content.name] if isinstance(content, Special) else str(content)
            whole += f"[[{text}]]" if values["weights"] else text
        found.append(whole.replace("]][[", ""))
    return found, reading.notes


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.jsonl.gz"])
def test_the_kinds_of_lines_are_one(write: Callable[..., Path], name: str) -> None:
    lines = [
        CHAT,
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": CHAT["messages"], "messages": None},  # a table with both
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": [QUESTION], "completion": [ANSWER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ANSWER]},
        {**CHAT, "tools": None, "id": 5},
    ]
    documents, notes = read(write(lines, name))
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello<|im_end|>]]\n"
    assert documents == [expected] * len(lines)
    assert not notes


def test_arguments_of_calls_are_objects() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    tools = '[{"type": "function"}]'
    record = {"messages": [QUESTION, {"role": "assistant", "tool_calls": [call]}], "tools": tools}
    messages, found = conversation(record, PLACE)
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    assert messages[1]["content"] == ""
    assert found == json.loads(tools)


@pytest.mark.parametrize("system", ["Be brief.", "", " \n", None])
def test_a_system_text_begins_a_conversation_that_has_none(system: str | None) -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    begins = [{"role": "system", "content": system}] if system == "Be brief." else []
    for record in ({"conversations": turns}, CHAT, {"prompt": "Hi", "completion": "Hello"}):
        messages, _ = conversation({"system": system, **record}, PLACE)
        assert messages == [*begins, QUESTION, ANSWER]
    own = {"role": "system", "content": "Be kind."}
    messages, _ = conversation({"system": system, "messages": [own, QUESTION, ANSWER]}, PLACE)
    assert messages == [own, QUESTION, ANSWER]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "Hi"}, "without"),
        ({"messages": []}, "a chat whose messages are not a list, or an empty one"),
        ({"messages": "Hi"}, "a chat whose messages are not a list"),
        ({"prompt": None, "completion": "Hi"}, "without"),
        ({"question": "Hi", "answer\x1b": "Hello"}, r"it has 'question', 'answer\\x1b'"),
        ({}, "it has no key"),
        ({"instruction": "Hi", "output": "Hello"}, "it has 'instruction', 'output'"),
        ({"chosen": "Human: Hi", "rejected": "Human: Hi"}, "preference data"),
        ({"messages": ["Hi"]}, "message 0: no object"),
        ({"messages": [{"content": "Hi"}]}, "message 0: no role None"),
        ({"messages": [QUESTION, {"role": "user<|im_end|>", "content": ""}]}, "message 1: no role"),
        ({"messages": [{"role": "user", "content": 5}]}, "not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not text alone"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
        ({"messages": [{**ANSWER, "tool_calls": "f"}]}, "tool_calls"),
        ({**CHAT, "tools": {}}, "tools"),
        ({**CHAT, "system": ["Be brief."]}, '"system" is not text'),
        ({**CHAT, "system": "\ud800"}, "lone surrogate"),
        ({**CHAT, "tools": [{"name": "\ud800"}]}, "lone surrogate"),
        ({"prompt": 5, "completion": "Hi"}, "not text"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_line(
    record: dict[str, Any], said: str
) -> None:
    with pytest.raises(MalformedError, match=said) as caught:
        conversation(record, PLACE)
    assert caught.value.where == "chats.jsonl, line 1, byte 0"


def test_lines_of_alpaca_are_refused_with_a_command_that_converts_them(
    write: Callable[..., Path],
) -> None:
    lines = [
        {"instruction": "Add.", "input": "2, 3", "output": "5"},
        {"instruction": "Grüße!", "input": "", "output": "Hallo"},
        {"instruction": "Hi", "output": "Hello"},
    ]
    path = write(lines, "my chats.jsonl")
    with pytest.raises(MalformedError, match="it has 'instruction', 'input', 'output'") as refused:
        read(path)
    said, _, command = str(refused.value.fix).partition(": python3")
    assert said.startswith(
        'write instruction and input (Alpaca) as "prompt", output as "completion"'
    )
    subprocess.run(f"{shlex.quote(sys.executable)}{command}", shell=True, check=True)
    documents, _ = read(path.with_name("my chats.chats.jsonl"))
    assert documents[0].startswith("<|im_start|>user\nAdd.\n\n2, 3<|im_end|>")
    assert documents[1].startswith("<|im_start|>user\nGrüße!<|im_end|>")
    assert documents[1].endswith("[[Hallo<|im_end|>]]\n")
    with pytest.raises(MalformedError) as refused:
        read(write(lines, "packed.jsonl.gz"))
    assert str(refused.value.fix) == said.partition(", then")[0]


@pytest.mark.parametrize(
    "pair",
    [
        {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
        {"prompt": "Hi", "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "No"}]},
        {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": []},
        {"prompt": "Hi", "chosen": [QUESTION, ANSWER], "rejected": [QUESTION]},
        {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION], "score": 0.5},
    ],
    ids=str,
)
def test_preference_data_are_refused_with_a_command_that_keeps_the_chosen_answers(
    write: Callable[..., Path], pair: dict[str, Any]
) -> None:
    with pytest.raises(MalformedError, match="preference data") as refused:
        read(write([pair], "pairs.jsonl"))
    assert '"chosen"' in str(refused.value.fix)
    _, _, command = str(refused.value.fix).partition(": python3")
    subprocess.run(f"{shlex.quote(sys.executable)}{command}", shell=True, check=True)
    documents, _ = read(write([], "pairs.jsonl").with_name("pairs.chats.jsonl"))
    assert documents == [read(write([CHAT]))[0][0]]


def test_a_line_without_an_answer_never_trains(write: Callable[..., Path]) -> None:
    lines = [
        CHAT,
        {"messages": [QUESTION]},
        {"prompt": "Hi"},
        {"messages": [QUESTION, {"role": "assistant", "content": " "}]},
        {"messages": [QUESTION, {**ANSWER, "weight": 0}]},
        {"messages": [QUESTION, {**ANSWER, "weight": -1}]},
    ]
    documents, notes = read(write(lines))
    assert len(documents) == 1
    assert notes == {
        "left out: lines without an answer": 4,
        'left out: lines whose chat is refused, "weight" of a message is not a number from 0': 1,
    }
    with pytest.raises(DataError, match="no conversation with an answer") as caught:
        read(write(lines[1:]))
    assert "lines without an answer: 4" in str(caught.value)


def test_reasons_of_a_template_are_counted_and_bounded(write: Callable[..., Path]) -> None:
    source = (
        "{% for m in messages %}{% if m.content == '' or '!' in m.content %}"
        "{{ raise_exception('not ' + m.content) }}{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    lines = [{"messages": [{"role": "user", "content": f"{n}!"}, ANSWER]} for n in range(20)]
    documents, notes = read(write([CHAT, *lines]), source)
    assert len(documents) == 1
    assert len(notes) == 9
    assert notes.total() == 20


def test_text_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hi")
    with pytest.raises(DataError, match="holds no conversations"):
        read(tmp_path / "a.txt")


def test_without_data_the_task_asks_for_chats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--preset", "tiny", "--task", "sft", "--steps", "1", "--out", str(tmp_path / "run"))
    assert main(["train", *words]) == 2
    err = capsys.readouterr().err
    assert "--task sft learns from chats, and no data are named" in err
    assert "--data FILE" in err
    assert "__future__" not in err


def test_names_of_special_tokens_are_identifiers_and_differ() -> None:
    texts = ["<|im_end|>", "<im_end>", "<|endoftext|>", "[/INST]", "<|>", "<<>>", "<|end_of_text|>"]
    names = names_of(texts)
    assert names["<|im_end|>"] == "im_end"
    assert names["<|endoftext|>"] == "end_of_text"
    assert len(set(names.values())) == len(texts)
    assert all(name.isidentifier() for name in names.values())


# Runs


def opened(plan: minillm.Plan, cache: Path) -> tuple[Corpus, list[str]]:
    said: list[str] = []
    config = plan.config
    more = {"cache": cache, "say": said.append, "asked": plan.sourcing}
    return open_corpus(config.data, config.model.vocab, config.train.seq_len, **more), said


def chats(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"What is {n} plus one, and why?", "completion": f"It is {n + 1}, my friend."}
        for n in range(count)
    ]


def test_labels_are_the_answers_and_their_ends(
    planned: Planned, write: Callable[..., Path], tmp_path: Path
) -> None:
    corpus, _ = opened(planned(write(chats(40))), tmp_path / "cache")
    assert corpus.tokenizer is not None
    assert corpus.specials == {"end_of_text": 0, "im_end": 1, "im_start": 2}
    found = set()
    for part in (corpus.train, corpus.val):
        for array, first, last in part.spans.tolist():
            rows = part.arrays[array][first:last]
            learnt = rows["ids"][rows["weights"] > 0].tolist()
            assert learnt.count(corpus.specials["im_end"]) == 1
            found.add(corpus.tokenizer.decode(learnt, specials=True))
    assert found == {f"It is {n + 1}, my friend.<|im_end|>" for n in range(40)}


def test_chats_longer_than_a_row_are_counted(
    planned: Planned, write: Callable[..., Path], tmp_path: Path
) -> None:
    late = [{"prompt": "why " * 300, "completion": "so"}] * 3
    early = [{"prompt": "a", "completion": "so " * 300}] * 4
    _, said = opened(planned(write([*chats(60), *late, *early]), data__val=0.01), tmp_path / "a")
    (note,) = [line for line in said if "longer than a row" in line]
    numbers = [int(word) for word in note.replace(",", "").split() if word.isdigit()]
    whole = planned(write([*chats(60), *late, *early]), data__val=0.01)
    corpus, _ = opened(whole, tmp_path / "a")
    seq_len = whole.config.train.seq_len
    kept = [corpus.train.arrays[a][x:y]["weights"] for a, x, y in corpus.train.spans.tolist()]
    longer = [weights for weights in kept if len(weights) > seq_len + 1]
    assert numbers == [len(longer), len(kept), sum(not w[: seq_len + 1].any() for w in longer)]
    assert 5 <= numbers[0] <= 7
    _, said = opened(planned(write(chats(60), "short.jsonl")), tmp_path / "a")
    assert not [line for line in said if "longer than a row" in line]


@pytest.mark.parametrize("plugins", ["sft", "sft,best_fit,length_buckets"])
def test_a_run_trains_on_chats_and_evaluates_their_answers(
    planned: Planned, write: Callable[..., Path], tmp_path: Path, plugins: str
) -> None:
    data = write(chats(60))
    made = minillm.Run(planned(data, plugins=plugins), cache=tmp_path / "cache").train()
    assert made.step == 2
    corpus, _ = opened(planned(data), tmp_path / "cache")
    answers = made.evaluate(data).tokens
    assert (
        0
        < answers
        <= sum(
            int((corpus.train.arrays[a][x:y]["weights"] > 0).sum())
            for part in (corpus.train, corpus.val)
            for a, x, y in part.spans.tolist()
        )
    )


def test_a_full_tokenizer_is_refused_and_plain_text_serves(
    planned: Planned, write: Callable[..., Path], tmp_path: Path
) -> None:
    base = tmp_path / "base.json"
    Tokenizer.train(["Some text, again and again."] * 9, 300).save(base)
    full = Tokenizer.load(base, 300).size
    given = {"data__tokenizer": str(base), "model__vocab": full}
    with pytest.raises(DataError, match=r"no special token <\|im_end\|> for plugin 'sft'"):
        opened(planned(write(chats(60)), **given), tmp_path / "cache")
    more = {**given, "model__vocab": full + 2}
    corpus, _ = opened(planned(write(chats(60)), **more), tmp_path / "cache")
    assert corpus.specials == {"end_of_text": 0, "im_end": full, "im_start": full + 1}
    plain = planned(write(chats(60)), sft__template="plain", **given)
    corpus, _ = opened(plain, tmp_path / "cache")
    assert corpus.specials == {"end_of_text": 0}


def test_a_mixture_of_chats_keeps_its_weights(
    planned: Planned, write: Callable[..., Path], tmp_path: Path
) -> None:
    first, second = write(chats(60)), write(chats(90)[60:], "b.jsonl")
    plan = planned(first, data__paths=[f"{first}:3", f"{second}:1"])
    corpus, _ = opened(plan, tmp_path / "cache")
    assert [(Path(part.name).name, part.weight) for part in corpus.parts] == [
        ("chats.jsonl", 3.0),
        ("b.jsonl", 1.0),
    ]


# The command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--task", "muon"), "'muon' is not a task"),
        (("--task", "sft", "sft.template=@missing"), "the file 'missing' that gives a setting"),
        (("--task", "sft", "sft.day=soon"), "sft.day"),
        (
            ("--task", "sft", "sft.template=nothing"),
            "there is no chat template of the name 'nothing'",
        ),
        (("--task", "sft", 'sft.tokens=["<x>"]'), "does not know the special token '<x>'"),
        (("--task", "sft", "sft.arguments={thnking = true}"), "the argument 'thnking'"),
    ],
)
def test_what_cannot_be_a_task_is_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["plan", *words])
    err = capsys.readouterr().err
    assert (code, said in err) == (2, True), err
    assert len(err.splitlines()) <= 12
    if words[-1] == "sft.template=nothing":
        assert "where: sft.template=nothing, its options, of minillm-chat" in err
        assert "fix:   chatml, plain, or a file with a chat template: @FILE" in err
        assert ".py" not in err


def test_a_base_run_with_free_rows_gets_the_special_tokens_of_a_template(
    tmp_path: Path, trained: Callable[..., Path]
) -> None:
    base, data = trained(None), trained().parent / "data.jsonl"
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "It is more."}]
    data.write_text((json.dumps({"messages": turns}) + "\n") * 60)
    entries = len(json.loads((base / "tokenizer.json").read_text())["model"]["vocab"])
    assert entries < 298  # of 300 rows
    loaded = minillm.load(plugins="sft", data=data, settings={"init": str(base), "train.lr": 1e-3})
    run = minillm.Run(minillm.build_plan(loaded), out=tmp_path / "chat", cache=tmp_path / "cache")
    run.train()
    assert run.specials["im_end"] >= entries
    assert run.step == 2  # the base's own steps are not counted


@pytest.mark.parametrize("template", ["chatml", "plain"])
def test_samples_answer_questions_of_held_out_chats(
    tmp_path: Path, template: str, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q"}]
    data, answer = tmp_path / "chats.jsonl", {"role": "assistant", "content": "Because."}
    with data.open("w") as file:
        for n in range(40):
            asked = [
                *turns[n % 2 :][:-1],
                {"role": "user", "content": f"Why is it {n}, my friend?"},
            ]
            file.write(json.dumps({"messages": [*asked, answer]}) + "\n")
    small = {**SMALL, "eval.samples": 1, "eval.every": 1, "sft.template": template}
    out = tmp_path / "out"
    words = [f"{key}={json.dumps(value)}" for key, value in small.items()]
    assert main(["train", "--task", "sft", "--data", str(data), "--out", str(out), *words]) == 0
    err = capsys.readouterr().err
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    samples = [one for one in events if one["event"] == "sample"]
    assert {one["step"] for one in samples} == {0, 1, 2}
    for one in samples:
        assert one["answers"] is True
        assert re.fullmatch(r"Why is it \d+, my friend\?", one["prompt"])
        assert f"the model answers '{one['prompt']}':" in err
    last = [one for one in samples if one["step"] == 2]
    assert len(last) == 2  # the beginning of `minillm chat`'s answers, with the sampling of samples
    run = minillm.Run.open(out)
    model = ChatModel.of(run)
    for number, one in enumerate(last):
        asked = [{"role": "user", "content": one["prompt"]}]
        said = model.answer(asked, max_tokens=96, temperature=0.8, seed=number)
        assert one["text"] == "".join(said).lstrip()
    assert f"minillm chat {out}" in err.partition("next:")[2]
    assert "minillm generate" not in err


def test_a_prompt_of_a_run_on_chats_is_a_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "chats.jsonl", tmp_path / "out"
    data.write_text((json.dumps({"prompt": "Hi there", "completion": "Hello."}) + "\n") * 40)
    words = [f"{key}={json.dumps(value)}" for key, value in SMALL.items() if key != "eval.samples"]
    held = ["--data", str(data), "--prompt", "Who?"]
    assert main(["train", "--task", "sft", "--out", str(out), *held, *words]) == 0
    assert "the model answers 'Who?'" in capsys.readouterr().err
