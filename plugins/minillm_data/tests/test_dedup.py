"""``minillm data dedup`` against brute-force oracles that compare all pairs, and its refusals."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import ConfigError, DataError, Refusal
from minillm_data.dedup import dedup

Program = Callable[..., tuple[int, str, str]]
Records = Sequence[dict[str, Any]]


def written(folder: Path) -> list[dict[str, Any]]:
    """Read the documents of a folder that a command wrote."""
    parts = sorted(folder.glob("part-*.jsonl"))
    return [json.loads(line) for part in parts for line in part.read_bytes().splitlines()]


def corpus(path: Path, records: Records) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records))
    return path


def run(
    folder: Path, records: Records, **options: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Deduplicate records in a folder; return the kept ones and the report."""
    report = dedup([corpus(folder / "in.jsonl", records)], folder / "out", **options)
    assert report == json.loads((folder / "out" / "report.json").read_text())
    assert sum(report["counts"].values()) == report["documents"]
    return written(folder / "out"), report


# Near duplicates


def mutants(seed: int, documents: int) -> list[str]:
    """Generate texts, many of them an earlier text with a share of its words replaced."""
    draw = random.Random(seed)
    texts: list[str] = []
    for _ in range(documents):
        words = [f"word{draw.randrange(400)}" for _ in range(draw.randrange(1, 120))]
        if texts and draw.random() < 0.6:
            share = draw.choice((0.0, 0.01, 0.03, 0.06, 0.2))
            words = [
                f"other{draw.randrange(400)}" if draw.random() < share else word
                for word in draw.choice(texts).split()
            ]
        texts.append(" ".join(words))
    return texts


def sets_of(texts: Sequence[str], width: int) -> list[set[tuple[str, ...]]]:
    """Compute the shingles of texts, as tuples of words."""
    found = []
    for text in texts:
        words = re.findall(r"\w+", text.lower())
        count = max(1, len(words) - width + 1) if words else 0
        found.append({tuple(words[n : n + width]) for n in range(count)})
    return found


def components(texts: Sequence[str], width: int, threshold: float) -> list[int]:
    """Find the first text of each text's group, by comparing every pair."""
    sets = sets_of(texts, width)
    first = list(range(len(texts)))
    for a, b in combinations(range(len(texts)), 2):
        shared = len(sets[a] & sets[b])
        alike = texts[a] == texts[b] or (sets[a] and shared / len(sets[a] | sets[b]) >= threshold)
        if alike and first[a] != first[b]:
            low, high = sorted((first[a], first[b]))
            first = [low if one == high else one for one in first]
    return first


@pytest.mark.broad(2)
@pytest.mark.parametrize(
    ("threshold", "width"), [(0.8, 4), (0.5, 4), (0.8, 1), (1.0, 3), (0.65, 2)]
)
def test_near_duplicates_are_those_of_a_comparison_of_every_pair(
    tmp_path: Path, threshold: float, width: int
) -> None:
    texts = mutants(7, 300)
    first = components(texts, width, threshold)
    expected = [n for n, one in enumerate(first) if n == one]
    alike = sum(first.count(one) > 1 for one in first)
    assert 20 < len(expected) < 290
    records = [{"text": text, "n": n} for n, text in enumerate(texts)]
    kept, report = run(tmp_path, records, threshold=threshold, shingle=width)
    assert [one["n"] for one in kept] == expected
    assert report["with_a_duplicate"] == alike
    assert report["share_with_a_duplicate"] == alike / 300
    assert report["share_duplicates_dropped"] == (300 - len(expected)) / 300
    equal = sum(text in texts[:n] for n, text in enumerate(texts))
    assert report["counts"]["exact duplicate"] == equal
    assert report["counts"].get("near duplicate", 0) == 300 - len(expected) - equal


def test_processes_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm_data.dedup._BATCH", 3000)
    path = corpus(tmp_path / "in.jsonl", [{"text": text} for text in mutants(3, 200)])
    for count in (1, 2):
        dedup([path], tmp_path / str(count), spans=5, processes=count)
    one, two = ((tmp_path / name / "part-00000.jsonl").read_bytes() for name in "12")
    assert one == two
    assert (tmp_path / "1" / "report.json").read_bytes() == (
        tmp_path / "2" / "report.json"
    ).read_bytes()


def test_case_and_punctuation_do_not_make_a_difference_but_words_do(tmp_path: Path) -> None:
    texts = ["A house, a tree; a dog.", "a HOUSE a tree - a dog", "a house a tree a cat"]
    kept, _ = run(tmp_path, [{"text": text} for text in texts])
    assert [one["text"] for one in kept] == [texts[0], texts[2]]


def test_scripts_without_spaces_are_compared_by_their_characters(tmp_path: Path) -> None:
    poem = "床前明月光疑是地上霜举头望明月低头思故乡" * 3 + "春眠不觉晓处处闻啼鸟"
    texts = [poem, poem + "夜", "白日依山尽黄河入海流欲穷千里目更上一层楼"]
    kept, _ = run(tmp_path, [{"text": text} for text in texts])
    assert [one["text"] for one in kept] == [texts[0], texts[2]]


def test_the_examples_name_the_document_that_stays(tmp_path: Path) -> None:
    long = " ".join(f"w{n}" for n in range(100))
    texts = ["first", long, "first", long + " end", "last"]
    _, report = run(tmp_path, [{"text": text} for text in texts])
    (equal,) = report["examples"]["exact duplicate"]
    (near,) = report["examples"]["near duplicate"]
    assert re.search(r"line 3, .*: the same as .*line 1, ", equal["where"])
    assert re.search(r"line 4, .*: Jaccard similarity 0.99 with .*line 2, ", near["where"])
    assert near["text"] == (long + " end")[:400]
    page = (tmp_path / "out" / "report.htm").read_text()
    assert "Jaccard similarity 0.99 with" in page
    assert "4 (80.00 %)" in page


# Exact duplicates


def chat(*contents: str, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for text in contents]}


def test_what_is_equal_is_a_text_a_chat_or_ids(tmp_path: Path) -> None:
    records = [
        {"text": "a\nb", "id": 0},
        {"text": "a\nb ", "id": 1},  # another byte
        {"text": "a\nb", "id": 2, "more": True},  # equal to 0
        {**chat("a", "b"), "id": 3},
        {**chat("a\nb"), "id": 4},  # the same text in one message
        {**chat("a", "b", role="system"), "id": 5},
        {**chat("a", "b"), "id": 6},  # equal to 3
        {"ids": [97, 10, 98], "id": 7},
        {"ids": [97, 10, 98, 0], "id": 8},
        {"ids": [97, 10, 98], "id": 9},  # equal to 7
        {"ids": [97], "text": "a\nb", "id": 10},  # training reads its ids, so text is not compared
        {**chat("a", "b"), "system": "Be brief.", "id": 11},
        {**chat("a", "b"), "tools": [{"name": "f"}], "id": 12},
        {**chat("a", "b"), "system": "Be brief.", "id": 13},  # equal to 11
        {**chat("a", "b", role="system"), "system": "not read", "id": 14},  # equal to 5
    ]
    kept, report = run(tmp_path, records, near=False)
    assert [one["id"] for one in kept] == [0, 1, 3, 4, 5, 7, 8, 10, 11, 12]
    assert report["counts"] == {"kept": 10, "exact duplicate": 5}
    assert report["with_a_duplicate"] == 10
    assert report["notes"] == {'left out: "text" of lines with "ids"': 1}


def test_ids_are_compared_as_words_are(tmp_path: Path) -> None:
    ids = list(range(200))
    records = [{"ids": ids}, {"ids": [*ids, 7]}, {"ids": ids[::-1]}]
    kept, report = run(tmp_path, records)
    assert kept == [records[0], records[2]]
    assert report["counts"]["near duplicate"] == 1


def test_lines_stay_byte_for_byte(tmp_path: Path) -> None:
    lines = [b'{"text":  "a\\u00e9", "x": [1.50]}\n', '{"y":1,"text":"é"}'.encode()]
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines))
    dedup([tmp_path / "in.jsonl"], tmp_path / "out")
    assert (tmp_path / "out" / "part-00000.jsonl").read_bytes() == b"".join(lines) + b"\n"


def test_nothing_to_read_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('\n{"text": ""}\n{"ids": []}\n')
    report = dedup([tmp_path / "in.jsonl"], tmp_path / "out", spans=9)
    assert (report["documents"], report["counts"], report["parts"]) == (0, {}, [])
    assert report["notes"] == {"left out: blank lines": 1, "left out: empty documents": 2}


# Spans


def without_spans(texts: Sequence[str], width: int, least: int) -> tuple[list[str | None], int]:
    """Cut spans that an earlier text contains, word by word; return the remaining texts and the words cut."""
    seen: set[tuple[str, ...]] = set()
    left: list[str | None] = []
    lost = 0
    for text in texts:
        places = [found.span() for found in re.finditer(r"\S+", text)]
        words = [text[start:end] for start, end in places]
        runs = [tuple(words[n : n + width]) for n in range(len(words) - width + 1)]
        cut = [
            any(run in seen for run in runs[max(0, n - width + 1) : n + 1])
            for n in range(len(words))
        ]
        if not any(cut) or len(words) - sum(cut) >= least:
            seen |= set(runs)  # a dropped text keeps no run from later ones
        if not any(cut):
            left.append(text)
            continue
        lost += sum(cut)
        # a gap between words goes where both are cut by spans that touch or overlap
        kept = list(text)
        for n, (start, end) in enumerate(places):
            if cut[n]:
                kept[start:end] = [""] * (end - start)
        for n, ((_, end), (start, _)) in enumerate(pairwise(places)):
            if cut[n] and cut[n + 1]:
                kept[end:start] = [""] * (start - end)
        left.append("".join(kept) if len(words) - sum(cut) >= least else None)
    return left, lost


TEXTS = st.lists(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=14).flatmap(
        lambda words: st.sampled_from([" ", "\n", " \t"]).map(lambda gap: gap.join(words))
    ),
    min_size=1,
    max_size=8,
    unique=True,
)


@settings(max_examples=40)
@given(TEXTS, st.integers(2, 5), st.sampled_from([None, 1, 3]))
def test_spans_are_those_of_a_search_word_by_word(
    texts: list[str], width: int, least: int | None
) -> None:
    with TemporaryDirectory() as folder:
        records = [{"text": text} for text in texts]
        kept, report = run(Path(folder), records, near=False, spans=width, min_words=least)
    left, lost = without_spans(texts, width, least or width)
    assert [one["text"] for one in kept] == [text for text in left if text is not None]
    assert report["cut"]["words"] == lost
    assert report["counts"].get("too short without its spans", 0) == left.count(None)
    cut = sum(text is not None and text != was for text, was in zip(left, texts, strict=True))
    assert report["counts"].get("kept, spans cut out", 0) == cut


def test_a_dropped_duplicate_takes_no_span_with_it(tmp_path: Path) -> None:
    words = [f"w{n}" for n in range(100)]
    own = " ".join(f"x{n}" for n in range(4))
    texts = [" ".join(words), f"{' '.join(words)} {own}", f"{own} {own[::-1]} y z"]
    kept, report = run(tmp_path, [{"text": text} for text in texts], spans=4)
    assert [one["text"] for one in kept] == [texts[0], texts[2]]
    assert report["counts"] == {"kept": 2, "near duplicate": 1}


def test_a_text_that_is_too_short_without_its_spans_takes_none_with_it(tmp_path: Path) -> None:
    first, own, new = ([f"{name}{n}" for n in range(120)] for name in "pqf")
    texts = [first[:100], first[40:100] + own[:40], new + own[:40]]
    records = [{"text": " ".join(words)} for words in texts]
    kept, report = run(tmp_path, records, near=False, spans=10, min_words=60)
    assert kept == [records[0], records[2]]
    assert report["counts"] == {"kept": 2, "too short without its spans": 1}


def test_other_keys_stay_where_spans_are_cut(tmp_path: Path) -> None:
    records = [{"text": "a b c d"}, {"id": "\ud800", "text": "é1 é2 a b c d é3 é4", "n": [1]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    report = dedup([tmp_path / "in.jsonl"], tmp_path / "out", near=False, spans=3)
    assert written(tmp_path / "out")[1] == {"id": "\ud800", "text": "é1 é2  é3 é4", "n": [1]}
    assert report["cut"] == {"spans": 1, "words": 4, "characters": 7}
    (example,) = report["examples"]["kept, spans cut out"]
    assert example["text"] == "a b c d"
    assert re.search(r"line 2, .*: cut out, as it is in .*line 1, ", example["where"])


def test_spans_are_cut_out_of_texts_alone(tmp_path: Path) -> None:
    for record in (chat("a", "b"), {"ids": [1, 2]}):
        path = corpus(tmp_path / "in.jsonl", [{"text": "a"}, record])
        with pytest.raises(DataError, match="a chat or a list of ids") as found:
            dedup([path], tmp_path / "out", spans=5)
        assert "line 2" in str(found.value.where)


# Refusals


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"threshold": 0.05}, "--threshold 0.05 is out of its range"),
        ({"threshold": 1.1}, "--threshold 1.1 is out of its range"),
        ({"threshold": float("nan")}, "--threshold nan is out of its range"),
        ({"shingle": 0}, "--shingle 0 is out of its range"),
        ({"spans": 1}, "--spans 1 is out of its range"),
        ({"spans": 9, "min_words": 0}, "--min-words 0 is out of its range"),
        ({"near": False, "threshold": 0.8}, "--threshold has no effect with --no-near"),
        ({"near": False, "shingle": 4}, "--shingle has no effect with --no-near"),
        ({"min_words": 5}, "--min-words has no effect with no --spans"),
    ],
)
def test_an_option_that_cannot_be_is_refused(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    path = corpus(tmp_path / "in.jsonl", [{"text": "a"}])
    with pytest.raises(ConfigError, match=re.escape(why)):
        dedup([path], tmp_path / "out", **options)
    assert [one.name for one in tmp_path.iterdir()] == ["in.jsonl"]


def test_without_rensa_the_pip_line_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = corpus(tmp_path / "in.jsonl", [{"text": "a"}, {"text": "a"}])
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(Refusal, match="rensa, which is not installed") as found:
        dedup([path], tmp_path / "out")
    assert "minillm-data[dedup]" in str(found.value.fix)
    assert dedup([path], tmp_path / "out", near=False)["counts"] == {
        "kept": 1,
        "exact duplicate": 1,
    }


def test_malformed_documents_stop_or_are_counted(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(
        b'{"text": "a b"}\n{"text": 7}\n{"ids": [1, "2"]}\n{"ids": [-1]}\n\xff\n{"text": "a b"}\n'
    )
    with pytest.raises(DataError) as found:
        dedup([tmp_path / "in.jsonl"], tmp_path / "out")
    assert "line 2, byte 16" in str(found.value.where)
    report = dedup([tmp_path / "in.jsonl"], tmp_path / "out", malformed="skip")
    assert report["counts"] == {"kept": 1, "exact duplicate": 1}
    assert sum(report["notes"].values()) == 4


def test_a_file_that_grows_between_the_readings_is_refused(tmp_path: Path) -> None:
    path = corpus(tmp_path / "in.jsonl", [{"text": "a b c d"}, {"text": "e f g h"}])
    grown = False

    def grow(what: str, done: int, total: int) -> None:
        nonlocal grown
        if what == "writing" and not grown:
            grown = True
            with path.open("a") as file:
                file.write('{"text": "more"}\n')

    with pytest.raises(DataError, match="the file changed while it was read"):
        dedup([path], tmp_path / "out", progress=grow)
    assert not (tmp_path / "out").exists()
    assert dedup([path], tmp_path / "out")["documents"] == 3


def test_a_folder_inside_the_data_is_refused(tmp_path: Path) -> None:
    corpus(tmp_path / "in.jsonl", [{"text": "a"}])
    with pytest.raises(DataError, match="inside one that is read"):
        dedup([tmp_path], tmp_path / "deep" / "out")


@pytest.mark.parametrize("call", ["pwrite", "fsync", "preadv"])
def test_a_full_disk_is_said_and_the_work_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = corpus(tmp_path / "in.jsonl", [{"text": "a b c d"}, {"text": "a b c d"}])

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(f"minillm_data.columns.os.{call}", full)
        with pytest.raises(DataError, match="cannot be written: No space left") as found:
            dedup([path], tmp_path / "out", spans=3)
    assert found.value.where == str(tmp_path / "out.unfinished")
    assert dedup([path], tmp_path / "out", spans=3)["counts"] == {"kept": 1, "exact duplicate": 1}


# The command


def test_the_command_writes_one_json_document(program: Program, tmp_path: Path) -> None:
    path = corpus(tmp_path / "in.jsonl", [{"text": "a"}, {"text": "a"}])
    code, out, _ = program("data", "dedup", str(path), "--to", str(tmp_path / "out"), "--json")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "out" / "report.json").read_text())
    code, out, err = program("data", "dedup", str(path), "--to", str(tmp_path / "out"))
    assert (code, out) == (2, "")
    assert "there is something already" in err


def test_the_command_says_what_became_of_the_documents(program: Program, tmp_path: Path) -> None:
    path = corpus(
        tmp_path / "in.jsonl", [{"text": "a b c"}, {"text": "a b c"}, {"text": "a b c d"}]
    )
    to = tmp_path / "out"
    code, out, _ = program("data", "dedup", str(path), "--to", str(to), "--no-near", "--spans", "3")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["1", "33.33", "%", "kept"]
    assert lines[1:3] == [
        ["1", "33.33", "%", "exact", "duplicate"],
        ["1", "33.33", "%", "too", "short", "without", "its", "spans"],
    ]
    assert lines[3][:8] == ["2", "of", "3", "documents", "(66.67", "%)", "have", "a"]
    assert "cut out: 1 span of 3 words" in out
    code, _, err = program("data", "dedup", str(path), "--to", "x", "--malformed", "skp")
    assert code == 2
    assert "did you mean skip?" in err


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from minillm_core.cli.main import main; main(['data', 'dedup', '--help']); "
        "print(sorted({'numpy', 'rensa', 'xxhash', 'torch'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "--threshold" in found.stdout
    assert found.stdout.rstrip().endswith("[]")
