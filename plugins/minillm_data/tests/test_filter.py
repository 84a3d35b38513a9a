"""``minillm data filter``: every document is kept byte for byte, or dropped and counted by a reason."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from minillm_core import ConfigError, DataError, MinillmError, Refusal, Run
from minillm_data.bits import Bits
from minillm_data.filter import edited, filter_rows
from minillm_data.judging import Filter, language_rule
from minillm_data.rows import Row
from minillm_data.rules import select

Program = Callable[..., tuple[int, str, str]]

GOOD = """Every morning the miller walked down to the river to look at his wheel.
When the water was low he had time to talk with neighbours about prices and weather.
His daughter kept accounts in a ledger, and she noticed that flour sold best before feasts.
One autumn a stranger arrived with seeds that nobody in our valley could name.
They were planted beside an old wall, where frost never reached them.
By summer tall yellow flowers stood there, and bees that came gave excellent honey."""
GERMAN = "Die Wörter dieses Textes stehen hier, damit eine Regel seine Sprache erkennt. " * 5


def write(path: Path, *records: Any) -> Path:
    lines = [
        one
        if isinstance(one, str)
        else json.dumps(one if isinstance(one, dict) else {"text": one[0]})
        for one in records
    ]
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8", newline="")
    return path


def kept(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("part-*.jsonl")))


def test_kept_lines_are_the_inputs_and_drops_are_counted(tmp_path: Path) -> None:
    good = '{"id" : 1.50, "text":' + json.dumps(GOOD) + ',"more":"\\u00e9é"}'
    source = write(tmp_path / "a.jsonl", ("few words",), good, {"text": ""}, {"text": "# " * 60})
    report = filter_rows([source], tmp_path / "out")
    assert kept(tmp_path / "out") == f"{good}\n".encode()
    assert report["counts"] == {
        "gopher.word-length: fewer than 3 characters a word": 1,
        "gopher.short: fewer than 50 words": 1,
        "kept": 1,
    }
    assert report["left_out"] == {"left out: empty documents": 1}
    assert (report["documents"], report["kept"]) == (3, 1)
    assert report["examples"]["gopher.short: fewer than 50 words"] == [
        {"where": f"{source}, line 1, byte 0", "text": "few words"}
    ]
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    page = (tmp_path / "out" / "report.htm").read_text()
    assert "few words" in page
    assert "fewer than 50 words" in page
    assert not (tmp_path / "out.unfinished").exists()


texts = st.one_of(
    st.text(st.sampled_from("abc def.\n{#\r\u2028é"), min_size=1, max_size=80),
    st.sampled_from([GOOD, GOOD + " {", "no end\n" + GOOD, GERMAN]),
)


@given(
    st.lists(texts, max_size=12),
    st.sampled_from(["gopher,fineweb", "c4", "c4,gopher,fineweb", "c4.line-words"]),
)
def test_a_document_is_kept_or_dropped_and_its_keys_stay(found: list[str], rules: str) -> None:
    whole = Filter(None, select(rules))
    for number, text in enumerate(found):
        line = json.dumps({"id": number, "text": text, "é": [1, None]}).encode() + b"\n"
        verdict = whole.judge(text)
        assert (verdict.text is None) == (not verdict.edits)
        if verdict.text is not None:
            written = edited(Row(line, json.loads(line), "here"), verdict.text)
            record = json.loads(written)
            assert set(record["text"].split("\n")) <= {*text.split("\n"), ""}
            assert list(record) == ["id", "text", "é"]
            assert {**record, "text": text} == json.loads(line)
            assert written.endswith(b"\n")
            assert written.count(b"\n") == 1


@pytest.mark.parametrize("rules", ["c4", "gopher,fineweb"])
def test_what_is_read_is_kept_or_dropped(tmp_path: Path, rules: str) -> None:
    found = [GOOD, "x", GERMAN, "no end\n" + GOOD, GOOD + "{", "line\n" * 60]
    source = write(tmp_path / "a.jsonl", *({"text": text} for text in found))
    report = filter_rows([source], tmp_path / "out", rules=rules)
    assert sum(report["counts"].values()) == report["documents"] == len(found)
    assert (
        report["kept"] == report["counts"]["kept"] == len(kept(tmp_path / "out").splitlines()) > 0
    )
    assert sum(report["bytes"].values()) == source.stat().st_size
    assert report["bytes_written"] == len(kept(tmp_path / "out"))
    assert report["bytes"].keys() == report["counts"].keys()
    assert report["bytes"]["kept"] >= report["bytes_written"]


def test_c4_edits_text_alone_and_counts_lines(tmp_path: Path) -> None:
    text = (
        "Menu\nThis is a line of seven words[3].\nHere is another one that stays. And a third one."
    )
    left = "This is a line of seven words.\nHere is another one that stays. And a third one."
    # the rest of the line is unchanged: escapes, number formats, spaces
    around = (
        ' {{"a": "\\ud800\\u00e9" ,"text" :\t{} , "n":1e400, "in":{{"text":"{{"}},"o":[1.50] }}\r'
    )
    source = write(tmp_path / "a.jsonl", around.format(json.dumps(text)))
    report = filter_rows([source], tmp_path / "out", rules="c4")
    assert kept(tmp_path / "out").decode() == around.format(json.dumps(left)) + "\n"
    assert report["lines"] == {"c4.citations": 1, "c4.punctuation": 1}
    assert [one["text"] for one in report["examples"]["c4.punctuation (a line)"]] == ["Menu"]


def test_a_document_of_which_no_line_is_left_is_dropped(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", ("Menu\nHome",))
    report = filter_rows([source], tmp_path / "out", rules="c4.punctuation")
    assert report["counts"] == {"empty: no line is left": 1}
    assert kept(tmp_path / "out") == b""


@pytest.mark.slow
def test_languages_are_told_apart(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", (GOOD,), (GERMAN,), ("xq",))
    report = filter_rows([source], tmp_path / "en", rules="none", languages=["en"])
    assert report["counts"]["language: de"] == 1
    assert [json.loads(one)["text"] for one in kept(tmp_path / "en").splitlines()] == [GOOD]
    both = filter_rows([source], tmp_path / "both", rules="none", languages=["de", "en"])
    assert both["kept"] == 2
    sure = filter_rows(
        [source], tmp_path / "sure", rules="none", languages=["en"], language_probability=1.0
    )
    assert sure["kept"] == 0
    assert sure["counts"]["language: en, but less likely than 1"] == 1


def test_an_unknown_language_and_a_missing_py3langid_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="no language 'english'"):
        language_rule(["en", "english"], 0.5)
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(Refusal) as refused:
        language_rule(["en"], 0.5)
    assert "pip install" in str(refused.value)
    assert "minillm-data[langid]" in str(refused.value)


class Length:
    """A stand-in for Bits: a text's bits per byte are a tenth of its number of characters."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Length:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return [len(text) / 10 for text in texts]


@pytest.mark.parametrize(
    ("least", "most", "left"), [(None, 2.0, [5, 20]), (1.0, None, [20, 40]), (1.0, 2.0, [20])]
)
def test_bits_have_bounds_that_are_kept_themselves(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    least: float | None,
    most: float | None,
    left: list[int],
) -> None:
    monkeypatch.setattr("minillm_data.filter.Bits", Length)
    monkeypatch.setattr("minillm_data.filter.checkpoint_of", lambda model: "step-1")
    source = write(tmp_path / "a.jsonl", *(("x" * count,) for count in (5, 20, 40)))
    report = filter_rows(
        [source], tmp_path / "out", rules="none", model="run", min_bits=least, max_bits=most
    )
    assert [len(json.loads(one)["text"]) for one in kept(tmp_path / "out").splitlines()] == left
    assert sum(report["counts"].values()) == 3


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"language_probability": 0.5}, "has no effect without --language"),
        ({"languages": ["en"], "language_probability": 1.5}, "is not a probability"),
        ({"max_bits": 2.0}, "without a model"),
        ({"model": "run"}, "without bounds"),
        (
            {"model": "run", "min_bits": 3.0, "max_bits": 2.0},
            "at least 3 bits per byte and at most 2",
        ),
        ({"model": "run", "max_bits": float("nan")}, "not a number of bits"),
        ({"model": "run", "min_bits": -1.0}, "not a number of bits"),
        ({"rules": "none"}, "no filter is named"),
        ({"rules": "gofer"}, "did you mean gopher"),
        ({"model": "run", "max_bits": 2.0}, "run"),
    ],
)
def test_options_that_are_wrong_or_without_effect_are_refused(
    tmp_path: Path, given: dict[str, Any], what: str
) -> None:
    source = write(tmp_path / "a.jsonl", (GOOD,))
    if "model" in given:
        given = {**given, "model": tmp_path / "run"}
    with pytest.raises(MinillmError) as refused:
        filter_rows([source], tmp_path / "out", **given)
    assert refused.value.exit_code in (2, 4)
    assert what in str(refused.value)
    assert not (tmp_path / "out.unfinished").exists()


def test_ids_are_refused_or_counted(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", {"ids": [1, 2], "text": GOOD}, (GOOD,))
    with pytest.raises(DataError, match="holds ids") as refused:
        filter_rows([source], tmp_path / "out")
    assert "a.jsonl, line 1" in str(refused.value)
    report = filter_rows([source], tmp_path / "skipped", malformed="skip")
    assert report["counts"] == {"ids: no text to judge": 1, "kept": 1}


def test_a_chat_is_judged_by_its_contents_and_never_edited(tmp_path: Path) -> None:
    chat = {
        "messages": [{"role": "user", "content": GOOD}, {"role": "assistant", "content": "Yes."}]
    }
    source = write(tmp_path / "a.jsonl", chat)
    report = filter_rows([source], tmp_path / "out", rules="gopher")
    assert report["kept"] == 1
    assert kept(tmp_path / "out") == source.read_bytes()
    with pytest.raises(DataError, match="a chat's messages are not edited"):
        filter_rows([source], tmp_path / "edited", rules="c4")


def test_a_document_that_cannot_be_read_stops_or_is_counted(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", (GOOD,), "not JSON", (GOOD,))
    with pytest.raises(DataError, match="not a line of JSON"):
        filter_rows([source], tmp_path / "strict")
    report = filter_rows([source], tmp_path / "skip", malformed="skip")
    assert report["left_out"] == {"left out: not a line of JSON": 1}
    assert report["kept"] == 2
    report = filter_rows([source], tmp_path / "only", rules="none", malformed="skip")
    assert (report["counts"], report["left_out"]) == (
        {"kept": 2},
        {"left out: not a line of JSON": 1},
    )


def test_a_folder_inside_what_is_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", (GOOD,))
    with pytest.raises(DataError, match="inside one that is read"):
        filter_rows([tmp_path], tmp_path / "out")


def test_text_files_become_rows(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "good.txt").write_text(GOOD)
    (folder / "short.txt").write_text("short")
    report = filter_rows([folder], tmp_path / "out")
    (line,) = kept(tmp_path / "out").splitlines()
    assert json.loads(line) == {"text": GOOD, "source": str(folder / "good.txt")}
    assert report["documents"] == 2


def test_the_command_prints_counts_or_one_document(program: Program, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", (GOOD,), ("Menu",))
    code, out, err = program("data", "filter", str(source), "--to", str(tmp_path / "a"))
    assert (code, err) == (0, "")
    assert "1   50.00 %      499 bytes  kept" in out
    assert "499 bytes of 516 bytes written" in out
    assert "gopher.short: fewer than 50 words" in out
    code, out, err = program("data", "filter", str(source), "--to", str(tmp_path / "b"), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads((tmp_path / "b" / "report.json").read_text())
    code, out, err = program("data", "filter", str(source), "--to", str(tmp_path / "a"))
    assert (code, out) == (2, "")
    assert "there is something already" in err


@pytest.mark.parametrize(
    "wrong",
    [
        ("--language-probability", "0.5"),
        ("--max-bits", "2"),
        ("--model", "run"),
        ("--rules", "none"),
        ("--rules", "c4,c4"),
        ("--language", "english"),
        ("--malformed", "skp"),
        ("--max-bits", "two"),
    ],
)
def test_the_command_refuses_with_exit_code_2(
    program: Program, tmp_path: Path, wrong: tuple[str, str]
) -> None:
    source = write(tmp_path / "a.jsonl", (GOOD,))
    code, out, err = program("data", "filter", str(source), "--to", str(tmp_path / "out"), *wrong)
    assert (code, out) == (2, "")
    assert wrong[0] in err
    assert "fix:" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rules", ["c4", "gopher,fineweb"])
def test_processes_change_nothing(tmp_path: Path, rules: str) -> None:
    records: list[Any] = []
    for number in range(3000):
        text = (GOOD, GERMAN, "short", f"Menu\n{GOOD}")[number % 4].replace("river", f"{number}")
        records.append({"ids": [number]} if number % 100 == 0 else {"text": text})
    source, found = write(tmp_path / "a.jsonl", *records), []
    for processes in (1, 2):
        to = tmp_path / str(processes)
        report = filter_rows(
            [source], to, rules=rules, languages=["en"], malformed="skip", processes=processes
        )
        found.append((report, kept(to)))
    assert found[0] == found[1]
    assert found[0][0]["kept"] > 1000
    with pytest.raises(DataError, match="line 1,"):
        filter_rows([source], tmp_path / "strict", processes=2)


def spaced(path: Path) -> Path:
    """Save a tokenizer like SentencePiece's, which puts a space in front of every text."""
    native = tokenizers.Tokenizer(models.BPE())
    native.pre_tokenizer = pre_tokenizers.Metaspace()
    native.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"])
    native.train_from_iterator([GOOD, GERMAN, "§±!x"], trainer)
    native.save(str(path))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte-level", "SentencePiece"])
def test_bits_are_those_of_an_evaluation(program: Program, tmp_path: Path, kind: str) -> None:
    text, run = tmp_path / "train.txt", tmp_path / "run"
    text.write_text(GOOD * 30)
    given = [f"data.tokenizer={spaced(tmp_path / 't.json')}"] if kind == "SentencePiece" else []
    options = ("--preset", "tiny", "--data", str(text), "--steps", "6", "--out", str(run), *given)
    small = (
        "model.layers=1",
        "model.dim=32",
        "model.heads=2",
        "model.kv_heads=1",
        "train.seq_len=32",
    )
    sizes = ("model.hidden=32", "model.vocab=300", "train.rows=4", "train.dtype=float32")
    code, _, err = program("train", *options, *small, *sizes, "--backend", "torch")
    assert code == 0, err
    found = [GOOD, GERMAN, "x", "§±!" * 50]
    with Bits(run) as bits:
        measured = bits(found)
        assert bits(found[::-1]) == pytest.approx(measured[::-1], rel=1e-5)
    with Run.open(run) as model:
        assert model.tokenizer is not None
        ids = [model.tokenizer.end_of_text, *model.tokenizer.encode(["x"])[0]]
        assert measured[found.index("x")] == pytest.approx(  # of one byte
            model.losses([ids])[0].sum() / math.log(2), rel=1e-5
        )
    for one, expected in zip(found, measured, strict=True):
        document = tmp_path / "one.txt"
        document.write_text(one)
        _, out, _ = program(
            "eval", str(run), "--data", str(document), "--max-tokens", "2048", "--json"
        )
        assert json.loads(out)["bits_per_byte"] == pytest.approx(expected, rel=1e-6)
    source = write(tmp_path / "a.jsonl", *({"text": one} for one in found))
    bound = (measured[0] + min(measured[1:])) / 2
    arguments = ("--rules", "none", "--model", str(run), "--max-bits", f"{bound}")
    code, out, err = program(
        "data", "filter", str(source), "--to", str(tmp_path / "out"), *arguments
    )
    assert code == 0, err
    assert [json.loads(one)["text"] for one in kept(tmp_path / "out").splitlines()] == [
        one for one, rate in zip(found, measured, strict=True) if rate <= bound
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "part-00000.jsonl",
        "report.htm",
        "report.json",
    ]
