"""``minillm data mix``: shares hold over any stretch, and each source's documents keep their order."""

from __future__ import annotations

import gc
import io
import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import ConfigError, DataError, MinillmError
from minillm_core.documents import next_source
from minillm_data.importance import BUCKETS, Hashed, log_ratio, log_weight, resample
from minillm_data.mix import Input, mix

Program = Callable[..., tuple[int, str, str]]


def write(path: Path, sizes: Sequence[int], name: str = "") -> Path:
    """Write a file of documents with the given bytes of text."""
    records = (
        {"text": "x" * size, "from": name or path.stem, "n": i} for i, size in enumerate(sizes)
    )
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def written(folder: Path) -> list[dict[str, Any]]:
    lines = b"".join(path.read_bytes() for path in sorted(folder.glob("part-*.jsonl"))).splitlines()
    return [json.loads(line) for line in lines]


sizes = st.lists(st.integers(1, 60) | st.just(1000), min_size=1, max_size=40)


@given(st.lists(st.tuples(st.integers(1, 50), sizes), min_size=1, max_size=6))
def test_each_share_holds_after_every_document_to_within_the_longest(
    sources: list[tuple[int, list[int]]],
) -> None:
    shares = [share for share, _ in sources]
    used, taken = [0] * len(sources), [0] * len(sources)
    longest = max(max(found) for _, found in sources)
    for _ in range(200):
        nexts = [found[n % len(found)] for (_, found), n in zip(sources, taken, strict=True)]
        turn = next_source(shares, used, nexts)
        used[turn] += nexts[turn]
        taken[turn] += 1
        for share, here in zip(shares, used, strict=True):
            assert abs(here - Fraction(share * sum(used), sum(shares))) <= longest


def test_taking_the_source_that_lags_most_would_not_do() -> None:
    """Show that the simple rule fails: with many sources it lags by more than a document."""
    shares = [1] * 5 + [45]
    sizes = [100] * 5 + [1]
    worst = {"lags most": Fraction(0), "ours": Fraction(0)}
    for name in worst:
        used = [0] * 6
        for _ in range(3000):
            if name == "ours":
                turn = next_source(shares, used, sizes)
            else:
                turn = max(range(6), key=lambda i: shares[i] * sum(used) - used[i] * sum(shares))
            used[turn] += sizes[turn]
            for share, here in zip(shares, used, strict=True):
                error = abs(here - Fraction(share * sum(used), sum(shares)))
                worst[name] = max(worst[name], error)
    assert worst["ours"] <= 100 < worst["lags most"]


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.lists(sizes, min_size=1, max_size=4),
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
    st.none() | st.integers(1, 3000),
    st.booleans(),
)
def test_a_mixture_has_the_sources_documents_in_their_order(
    found: list[list[int]], weights: list[int], size: int | None, repeat: bool
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        inputs = [
            f"{write(folder / f'{i}.jsonl', one)}:{weights[i]}" for i, one in enumerate(found)
        ]
        size = size and max(size, *(one[0] for one in found))  # of any first document
        report = mix(inputs, folder / "out", size=size, repeat=repeat)
        mixed = written(folder / "out")
    total, longest = 0, max(map(max, found))
    used, counts = [0] * len(found), [0] * len(found)
    whole = sum(weights[: len(found)])
    for record in mixed:
        source = int(record["from"])
        assert record["n"] == counts[source] % len(found[source])
        counts[source] += 1
        used[source] += len(record["text"])
        total += len(record["text"])
        for weight, here in zip(weights, used, strict=False):
            assert abs(here - weight * total / whole) <= longest + 1e-5 * total
    assert report["total"] == total <= (size or total)
    assert report["documents"] == len(mixed) == sum(counts)
    for one, here, count, every in zip(report["sources"], used, counts, found, strict=True):
        assert (one["written"], one["documents"]) == (here, count)
        assert one["epochs"] is None or one["epochs"] == pytest.approx(here / sum(every))
        assert repeat or count <= len(every)
    if size is None and repeat:
        assert all(count >= len(every) for count, every in zip(counts, found, strict=True))
        assert report["ended"] == "every source was read once"
    if size is None and not repeat:
        assert any(count == len(every) for count, every in zip(counts, found, strict=True))


@settings(max_examples=40)
@given(st.lists(sizes, min_size=1, max_size=4))
def test_shares_by_size_use_everything(found: list[list[int]]) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        paths = [write(folder / f"{i}.jsonl", one) for i, one in enumerate(found)]
        report = mix(paths, folder / "out")
        assert len(written(folder / "out")) == sum(map(len, found))
    assert report["ended"] == "every source is used up"
    assert all(one["unused"] == 0 for one in report["sources"])


def test_no_file_stays_open_if_the_size_is_reached_first(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", [10] * 2000) for name in "ab"]
    gc.disable()  # it would close them, at some time and with a warning
    try:
        mix(paths, tmp_path / "out", size=600)
        files = [one for one in gc.get_objects() if isinstance(one, io.FileIO)]
        assert not [one for one in files if str(one.name) in map(str, paths) and not one.closed]
    finally:
        gc.enable()


def test_a_temperature_raises_small_sources(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl", [10] * 800), write(tmp_path / "b.jsonl", [10] * 100)]
    report = mix(paths, tmp_path / "out", temperature=3, repeat=True, size=6000)
    assert [one["share"] for one in report["sources"]] == pytest.approx([2 / 3, 1 / 3], abs=1e-8)
    assert [one["written"] for one in report["sources"]] == [4000, 2000]
    assert [one["epochs"] for one in report["sources"]] == [0.5, 2.0]
    assert (report["total"], report["ended"]) == (6000, "the size is reached")


@pytest.mark.parametrize(
    ("weights", "temperature", "shares"),
    [
        (("1.5e308", "0.5e308"), None, [0.75, 0.25]),
        (("", ""), 0.001, [1, 0]),
        (("", ""), 1e-320, [1, 0]),
    ],
)
def test_extreme_weights_and_temperatures_have_the_shares_that_they_ask_for(
    tmp_path: Path, weights: Sequence[str], temperature: float | None, shares: list[float]
) -> None:
    paths = [write(tmp_path / "a.jsonl", [10] * 800), write(tmp_path / "b.jsonl", [10] * 100)]
    named = [f"{path}:{weight}".rstrip(":") for path, weight in zip(paths, weights, strict=True)]
    report = mix(named, tmp_path / "out", temperature=temperature)
    assert [one["share"] for one in report["sources"]] == pytest.approx(shares, abs=1e-8)


def test_a_source_that_is_used_up_ends_the_mixture_and_the_rest_is_said(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl", [10] * 10), write(tmp_path / "b.jsonl", [10] * 100)]
    report = mix([f"{paths[0]}:0.5", f"{paths[1]}:0.5"], tmp_path / "out")
    assert report["ended"] == f"{paths[0]} is used up"
    assert [one["written"] for one in report["sources"]] == [100, 100]
    assert [one["unused"] for one in report["sources"]] == [0, 900]
    assert [one["epochs"] for one in report["sources"]] == [1.0, 0.1]


def test_lines_are_written_byte_for_byte(tmp_path: Path) -> None:
    line = b'{"n": 1.0e0 ,"text":"\\u00e9", "more": [ ]}\n'
    (tmp_path / "a.jsonl").write_bytes(line)
    mix([tmp_path / "a.jsonl"], tmp_path / "out")
    assert (tmp_path / "out" / "part-00000.jsonl").read_bytes() == line


def test_bytes_are_those_of_utf_8_and_tokens_those_of_a_tokenizer(
    tmp_path: Path, repository: Path
) -> None:
    from minillm_core.documents import Tokenizer

    (tmp_path / "a.jsonl").write_text('{"text": "\u00e9\u00e9\u00e9"}\n', "utf-8")
    write(tmp_path / "b.jsonl", [6])
    report = mix([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "out")
    assert [one["written"] for one in report["sources"]] == [6, 6]
    tokenizer = Tokenizer.train(["ab " * 50], 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "ids.jsonl").write_text('{"ids": [1, 2, 3], "text": "a"}\n{"ids": [0, 1]}\n')
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "ids.jsonl"]
    with pytest.raises(DataError, match="count tokens"):
        mix(inputs, tmp_path / "bytes")
    report = mix(inputs, tmp_path / "tokens", tokenizer=tmp_path / "tokenizer.json")
    counts = [1 + len(ids) for ids in tokenizer.encode(["\u00e9" * 3, "x" * 6])]
    assert [one["written"] for one in report["sources"]] == [*counts, 4 + 2]
    assert report["unit"] == "tokens"


@pytest.mark.parametrize(
    ("text", "path", "weight"),
    [
        ("a.jsonl", "a.jsonl", None),
        ("a.jsonl:0.7", "a.jsonl", 0.7),
        ("a.jsonl:1e-3", "a.jsonl", 0.001),
        ("a.jsonl:.5", "a.jsonl", 0.5),
        ("c:a.jsonl", "c:a.jsonl", None),
        ("a:1:2", "a:1", 2.0),
        ("a:1x", "a:1x", None),
        ("a:nan", "a:nan", None),
        ("a:", "a:", None),
    ],
)
def test_what_follows_the_last_colon_is_a_weight_if_it_is_a_number(
    text: str, path: str, weight: float | None
) -> None:
    assert Input.parse(text) == Input(path, weight)


@pytest.mark.parametrize("text", ["a:0", "a:-1", "a:1e999", "a:0.0"])
def test_a_weight_is_above_0(text: str) -> None:
    with pytest.raises(ConfigError, match="not above 0"):
        Input.parse(text)


def test_a_path_with_a_colon_and_a_number_is_reached_by_a_weight(tmp_path: Path) -> None:
    write(tmp_path / "a:1", [3])
    (tmp_path / "a:1").rename(tmp_path / "a:1.jsonl")
    assert mix([tmp_path / "a:1.jsonl"], tmp_path / "out")["total"] == 3
    (tmp_path / "a:1.jsonl").rename(tmp_path / "a.jsonl:1")
    report = mix([f"{tmp_path / 'a.jsonl:1'}:1"], tmp_path / "text")  # a text by its suffix
    assert report["sources"][0]["path"] == str(tmp_path / "a.jsonl:1")


@pytest.mark.parametrize(
    ("inputs", "given", "what"),
    [
        (["a:1", "b"], {}, "others have none"),
        (["a:1", "b:1"], {"temperature": 2.0}, "--temperature with weights"),
        (["a"], {"temperature": 2.0}, "--temperature with one source"),
        (["a", "b"], {"temperature": 0.0}, "is not above 0"),
        (["a", "b"], {"repeat": True}, "--repeat without --size"),
        (["a", "b"], {"seed": 1}, "--seed without --like"),
        (["a", "b"], {"size": 0}, "a mixture of size 0"),
        (["a", "b"], {"like": ["b"]}, "needs a size"),
        (["a:1", "b:1"], {"like": ["b"], "size": 9}, "weights with --like"),
        (["a", "b"], {"like": ["b"], "size": 9, "repeat": True}, "--repeat with --like"),
        (["a", "b"], {"like": ["b"], "size": 9, "temperature": 2.0}, "--temperature with --like"),
        (["a", "a"], {}, "named twice"),
        ([], {}, "nothing to mix"),
        (["missing"], {}, "no such file"),
        (["a", "empty"], {}, "has no document"),
        (["a:1", "empty:1"], {}, "has no document"),
        (["a:1", "empty:1"], {"repeat": True}, "has no document"),
        (["a", "b"], {"like": ["empty"], "size": 9}, "there is no text"),
        (["a", "b"], {"like": ["b"], "size": 1}, "has more than 1 bytes"),
        (["a", "b"], {"size": 3}, "the first document of the mixture has more than 3 bytes"),
        (["a", "b"], {"tokenizer": "a"}, "tokenizer cannot be read"),
    ],
)
def test_options_that_are_wrong_or_without_effect_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inputs: list[str],
    given: dict[str, Any],
    what: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, found in (("a", [5, 5]), ("b", [5])):
        write(Path(f"{name}.jsonl"), found)
    Path("empty.jsonl").write_text('{"text": ""}\n')
    named = [one.replace(":1", ".jsonl:1") if ":" in one else f"{one}.jsonl" for one in inputs]
    given = {
        key: [f"{one}.jsonl" for one in value] if key == "like" else value
        for key, value in given.items()
    }
    with pytest.raises(MinillmError) as refused:
        mix(named, "out", **given)
    assert refused.value.exit_code == 2
    assert what in str(refused.value)
    assert not Path("out").exists()


def test_a_document_that_cannot_be_read_stops_or_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [5, 6])
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(DataError, match="line 1"):
        mix([path], tmp_path / "strict")
    report = mix([path], tmp_path / "skip", malformed="skip")
    assert report["left_out"] == {"left out: not a line of JSON": 1}
    assert report["documents"] == 2


def test_what_is_left_out_of_a_source_is_counted_once_however_often_it_is_read(
    tmp_path: Path,
) -> None:
    long, short = write(tmp_path / "a.jsonl", [5] * 40), write(tmp_path / "b.jsonl", [5] * 7)
    short.write_text(f"{short.read_text()}nonsense\n{json.dumps({'text': ''})}\n")
    report = mix([f"{long}:1", f"{short}:1"], tmp_path / "out", repeat=True, malformed="skip")
    assert report["sources"][1]["epochs"] > 5
    assert report["left_out"] == {
        "left out: empty documents": 1,
        "left out: not a line of JSON": 1,
    }


def test_a_folder_inside_what_is_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [5])
    with pytest.raises(DataError, match="inside one that is read"):
        mix([f"{tmp_path}:1"], tmp_path / "out")


# Importance resampling (DSIR)


def test_words_and_pairs_are_hashed_alike_in_every_process() -> None:
    buckets = Hashed().buckets("The cat, the CAT")
    assert len(buckets) == 2 * 5 - 1
    assert buckets[0] == buckets[3]  # the
    assert buckets[1] == buckets[4]  # cat
    assert buckets[5] == buckets[8]  # the cat
    assert buckets[:5].tolist() == [crc32(word) % BUCKETS for word in b"the cat , the cat".split()]
    assert ((buckets >= 0) & (buckets < BUCKETS)).all()
    assert len(Hashed().buckets("")) == 0
    assert len(Hashed().buckets("one")) == 1


def test_pairs_are_spread_over_the_buckets() -> None:
    buckets = Hashed().buckets(" ".join(f"w{i}" for i in range(100_000)))[100_000:]
    counts = np.bincount(buckets, minlength=BUCKETS)
    # a chi-square of BUCKETS - 1 degrees of freedom, within six standard deviations
    statistic = ((counts - 10.0) ** 2 / 10.0).sum()
    assert abs(statistic - BUCKETS) < 6 * (2 * BUCKETS) ** 0.5


def test_a_log_weight_is_of_a_stretch_and_not_of_the_length() -> None:
    hashed = Hashed()
    target, other = "red green blue " * 50, "north south east west " * 50
    counts = [np.bincount(hashed.buckets(text), minlength=BUCKETS) for text in (target, other)]
    ratio = log_ratio(counts[0], counts[0] + counts[1])
    short, long = (hashed.buckets("red green blue " * n) for n in (2, 200))
    assert log_weight(ratio, short) == pytest.approx(log_weight(ratio, long), rel=0.01)
    assert log_weight(ratio, long) > 0 > log_weight(ratio, hashed.buckets(other))
    assert log_weight(ratio, hashed.buckets("")) == float("-inf")


@given(
    st.lists(st.tuples(st.floats(-50, 50), st.integers(1, 30)), min_size=1, max_size=40),
    st.integers(0, 400),
    st.integers(0, 9),
)
def test_a_draw_fits_and_the_next_document_would_not(
    documents: list[tuple[float, int]], size: int, seed: int
) -> None:
    weights, lengths = np.array([one for one, _ in documents]), np.array([n for _, n in documents])
    drawn = resample(weights, lengths, size, seed)
    assert (drawn == resample(weights, lengths, size, seed)).all()
    assert lengths[drawn].sum() <= size
    keys = weights + np.random.default_rng(seed).gumbel(size=len(weights))
    if not drawn.all():
        best = np.argmax(np.where(drawn, -np.inf, keys))
        assert lengths[drawn].sum() + lengths[best] > size
        assert not drawn.any() or keys[drawn].min() >= keys[best]


def test_documents_are_drawn_in_proportion_to_their_weights() -> None:
    weights, ones = np.log([1.0, 2.0, 5.0]), np.ones(3, np.int64)
    first = [int(np.argmax(resample(weights, ones, 1, seed))) for seed in range(4000)]
    shares = np.bincount(first, minlength=3) / 4000
    assert shares == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.03)


def test_what_resembles_the_target_is_picked(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sea, farm = (
        ["ship", "sail", "wave", "harbour", "crew", "storm"],
        ["cow", "field", "hay", "barn", "plough", "goat"],
    )

    def corpus(name: str, *kinds: list[str]) -> Path:
        texts = [" ".join(rng.choice(kinds[i % len(kinds)], 40)) for i in range(60)]
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path

    mixed, target = corpus("mixed.jsonl", sea, farm), corpus("target.jsonl", sea)
    size = mixed.stat().st_size // 4
    report = mix([mixed], tmp_path / "out", like=[target], size=size)
    picked = written(tmp_path / "out")
    assert len(picked) == report["documents"] > 10
    assert all(set(one["text"].split()) <= set(sea) for one in picked)
    assert report["total"] == sum(len(one["text"]) for one in picked) <= size
    assert report["log_weight"]["picked"] > report["log_weight"]["all"]
    lines = mixed.read_bytes().splitlines()
    places = [lines.index(json.dumps(one).encode()) for one in picked]
    assert places == sorted(places)
    again = mix([mixed], tmp_path / "again", like=[target], size=size)
    assert written(tmp_path / "again") == picked
    assert again == report
    mix([mixed], tmp_path / "seed", like=[target], size=size, seed=1)
    assert written(tmp_path / "seed") != picked
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "part-00000.jsonl",
        "report.htm",
        "report.json",
    ]


# The command


def test_the_command_prints_shares_or_one_document(program: Program, tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", [10] * 70), write(tmp_path / "b.jsonl", [10] * 30)
    code, out, err = program("data", "mix", f"{a}:0.5", f"{b}:0.5", "--to", str(tmp_path / "one"))
    assert (code, err) == (0, "")
    assert "300 bytes, 50.00 % (asked: 50.00 %), 30 documents, 0.43 epochs, 400 unused" in out
    assert "600 bytes in 60 documents" in out
    code, out, err = program("data", "mix", str(a), str(b), "--to", str(tmp_path / "two"), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads((tmp_path / "two" / "report.json").read_text())
    like = ("--like", str(b), "--size", "200", "--seed", "3")
    code, out, err = program("data", "mix", str(a), str(b), "--to", str(tmp_path / "c"), *like)
    assert (code, err) == (0, "")
    assert "200 bytes in 20 documents" in out
    assert "a.jsonl" in (tmp_path / "c" / "report.htm").read_text()


@pytest.mark.parametrize(
    "wrong",
    [
        ("--seed", "1"),
        ("--repeat",),
        ("--temperature", "-1"),
        ("--size", "0"),
        ("--size", "many"),
        ("--like", "b.jsonl"),
        ("--malformed", "skp"),
    ],
)
def test_the_command_refuses_with_exit_code_2(
    program: Program, tmp_path: Path, wrong: tuple[str, ...]
) -> None:
    a, b = write(tmp_path / "a.jsonl", [10]), write(tmp_path / "b.jsonl", [10])
    code, out, err = program("data", "mix", str(a), str(b), "--to", str(tmp_path / "out"), *wrong)
    assert (code, out) == (2, "")
    assert wrong[0] in err
    assert "fix:" in err
    assert not (tmp_path / "out").exists()
