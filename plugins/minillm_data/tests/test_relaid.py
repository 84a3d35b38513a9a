"""fim and domain_tokens: the rewritten rows, against token-by-token oracles."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minillm_core as minillm
from minillm_core import DataError, Plugin
from minillm_core.documents import Reading, find
from minillm_core.inspection import Documents, Loader, batch_hook
from minillm_data.domain_tokens import DomainTokens, domains_of
from minillm_data.fim import Fim
from minillm_data.relaid import relaid

T, VOCAB = 24, 500


def hook(*plugins: Plugin, progress: float = 0.5, **given: Any) -> Any:
    from minillm_core.plugins.manager import LoadedPlugin

    settings = {"train.seq_len": T, "model.vocab": VOCAB, **({"train.steps": 10} | given)}
    settings = {key: value for key, value in settings.items() if value is not None}
    config = minillm.load("tiny", settings=settings).config
    names = [type(one).__name__.lower() for one in plugins]
    loaded = [LoadedPlugin.of(n, one) for n, one in zip(names, plugins, strict=True)]
    plan = minillm.build_plan(config, loaded)
    return batch_hook(plan, progress=lambda: progress)


def stream(lengths: list[int], rows: int = 2, domain: bool = False) -> dict[str, np.ndarray]:
    """Return rows of concatenated documents; all ids differ, except 0, the end-of-text id."""
    size = rows * T + 1
    ids, numbers = [], []
    number = 0
    while len(ids) < size:
        for length in lengths:
            ids += [0, *range(len(ids) + 11, len(ids) + 10 + length)]
            numbers += [number] * length
            number += 1
    ids, numbers = np.array(ids[:size], np.int32), np.array(numbers[:size])
    documents = numbers[:-1].reshape(rows, T)
    batch = {
        "ids": ids[:-1].reshape(rows, T),
        "labels": ids[1:].reshape(rows, T),
        "documents": (documents - documents[:, :1]).astype(np.int32),
        "positions": np.tile(np.arange(T, dtype=np.int32), (rows, 1)),
    }
    if domain:
        value = np.where(ids == 0, 0, 1 + numbers % 2).astype(np.int32)
        batch["domain"] = value[:-1].reshape(rows, T)
        batch["target_domain"] = value[1:].reshape(rows, T)
    return batch


def consistent(batch: dict[str, np.ndarray]) -> None:
    """Check that every label is the next token of the row, or -1."""
    labels, following = batch["labels"][:, :-1], batch["ids"][:, 1:]
    known = labels >= 0
    np.testing.assert_array_equal(labels[known], following[known])
    assert (batch["documents"] >= 0).all()


def documents_of_row(batch: dict[str, np.ndarray], row: int) -> list[list[int]]:
    numbers = batch["documents"][row]
    return [batch["ids"][row][numbers == n].tolist() for n in range(int(numbers.max()) + 1)]


PRE, MID, SUF = 2, 1, 3  # reserved in the order of their texts: middle, prefix, suffix
lengths = st.lists(st.integers(1, 30), min_size=1, max_size=5)


@given(lengths, st.floats(0.2, 1), st.floats(0, 1))
@settings(deadline=None, max_examples=25)
def test_fim_keeps_a_documents_ids_and_moves_its_middle(
    lengths: list[int], rate: float, spm: float
) -> None:
    batch = stream(lengths)
    before = {name: array.copy() for name, array in batch.items()}
    made = hook(Fim(rate=rate, spm=spm))(batch, "train")
    for name, array in before.items():
        np.testing.assert_array_equal(batch[name], array)
    consistent(made)
    for row in range(2):
        old, new = documents_of_row(before, row), documents_of_row(made, row)
        assert len(new) <= len(old)
        for number, (was, now) in enumerate(zip(old, new, strict=False)):
            cut = number == len(new) - 1  # at the row's end
            if PRE not in now:
                assert was[: len(now)] == now
                continue
            assert set(now) - {PRE, MID, SUF} <= set(was)
            if not cut or len(now) == len(was) + 3:
                assert sorted(now) == sorted([*was, PRE, MID, SUF])
                assert rejoined(now) == was


def rejoined(ids: list[int]) -> list[int]:
    """Restore the original document from its layout with the middle last: the oracle."""
    front, rest = ids[: ids.index(PRE)], ids[ids.index(PRE) + 1 :]
    first, middle = rest[: rest.index(MID)], rest[rest.index(MID) + 1 :]
    at = first.index(SUF)
    if at == 0:  # SPM: the prefix is followed by the middle, and their boundary is not marked
        suffix = first[1:]
        return front + middle + suffix
    return front + first[:at] + middle + first[at + 1 :]


def test_the_rate_is_the_share_of_documents_and_spm_of_those() -> None:
    made = hook(Fim(rate=0.3, spm=0.25))
    laid = [0, 0, 0]
    for _ in range(150):
        for row in range(2):
            batch = made(stream([5, 6]), "train")
            for document in documents_of_row(batch, row)[:3]:
                swapped = any(pair == (PRE, SUF) for pair in itertools.pairwise(document))
                laid[0] += 1
                laid[1] += PRE in document
                laid[2] += swapped
    assert abs(laid[1] / laid[0] - 0.3) < 0.05
    # PSM with an empty prefix looks like SPM: the smaller of two cuts drawn from 5 or 6 places is 0
    assert 0.25 < laid[2] / laid[1] < 0.65


def test_fim_ends_a_middle_where_its_document_ends_alone() -> None:
    batch = stream([8, 30])
    made = hook(Fim(rate=1.0, spm=0.0))(batch, "train")
    first, second = documents_of_row(made, 0)
    assert made["labels"][0, len(first) - 1] == 0  # of the document behind it
    assert len(second) == T - len(first)
    consistent(made)
    # the row's last segment continues in the next row: no label after its middle
    long = hook(Fim(rate=1.0, spm=0.0))(stream([200], rows=1), "train")
    consistent(long)
    for phase in ("eval", "decode"):
        for name, array in hook(Fim())(stream([5]), phase).items():
            np.testing.assert_array_equal(array, stream([5])[name])


@given(lengths)
@settings(deadline=None, max_examples=12)
def test_a_domains_token_stands_behind_the_end_of_text(lengths: list[int]) -> None:
    batch = stream(lengths, domain=True)
    plugin = DomainTokens(domains=["code", "wiki"], cooldown=0.25)
    made = hook(plugin)(batch, "train")
    consistent(made)
    for row in range(2):
        expected, labels, domains = [], [], []
        for t in range(T):
            token, label = int(batch["ids"][row, t]), int(batch["labels"][row, t])
            expected.append(token)
            labels.append(label)
            domains.append(int(batch["domain"][row, t]))
            more = t + 1 < T and batch["documents"][row, t + 1] == batch["documents"][row, t]
            if token == 0 and more:
                domain = int(batch["domain"][row, t + 1])
                labels[-1] = -1
                expected.append(domain)  # ids 1 and 2: code, wiki
                labels.append(label)
                domains.append(0)
        assert made["ids"][row].tolist() == expected[:T]
        assert made["labels"][row].tolist() == labels[:T]
        assert made["domain"][row].tolist() == domains[:T]
    np.testing.assert_array_equal(made["target_domain"][:, :-1], made["domain"][:, 1:])
    for phase, progress in (("train", 0.76), ("eval", 1.0), ("decode", 1.0)):
        same = hook(plugin, progress=progress)(batch, phase)
        np.testing.assert_array_equal(same["ids"], batch["ids"])
    assert (hook(plugin, progress=0.75)(batch, "train")["ids"] == made["ids"]).all()


def mixture() -> tuple[Documents, list[tuple[float, Documents]]]:
    """Return a mixture of two sources, of ids below and above 200, with each token's domain."""
    lengths = [7, 40, 5, 9, 30, 4, 12]
    ends = np.cumsum(lengths)
    array = np.zeros(ends[-1], [("ids", np.int32), ("domain", np.int32)])
    array["ids"] = np.arange(20, 20 + ends[-1]) + np.where(np.arange(ends[-1]) < ends[2], 0, 200)
    array["domain"] = 1 + (array["ids"] > 200)
    array["ids"][ends - lengths] = array["domain"][ends - lengths] = 0  # end of text
    spans = np.stack([np.zeros_like(ends), ends - lengths, ends], axis=1)
    whole = Documents((array,), spans, VOCAB, "made here")
    return whole, [(1.0, whole.part("a", spans[:3])), (2.0, whole.part("b", spans[3:]))]


@pytest.mark.parametrize("plugin", [Fim(rate=1.0), DomainTokens(domains=["code", "wiki"])])
@pytest.mark.parametrize("seed", range(3))
def test_a_mixtures_rows_stay_those_of_their_source(plugin: Plugin, seed: int) -> None:
    whole, parts = mixture()
    size = {"rows": 4, "accumulate": 1, "seq_len": T, "seed": seed, "parts": parts}
    found, relaid_rows = Counter[int](), 0
    with Loader(whole, **size) as plain, Loader(whole, **size, on_batch=hook(plugin)) as loader:
        for before, step in itertools.islice(zip(plain, loader, strict=True), 6):
            (old,), (batch,) = before.micro, step.micro
            consistent(batch)
            np.testing.assert_array_equal(batch["source"], old["source"])
            np.testing.assert_array_equal(batch["positions"], old["positions"])
            relaid_rows += int((batch["ids"] != old["ids"]).any(axis=1).sum())
            for ids, source in zip(batch["ids"], batch["source"], strict=True):
                assert {*np.where(ids[ids >= 20] > 200, 1, 0).tolist()} == {int(source[0])}
                found[int(source[0])] += 1
    assert found == {0: 8, 1: 16}
    assert relaid_rows > 12


def test_fim_leaves_the_domains_token_in_front() -> None:
    plugins = (Fim(rate=1.0), DomainTokens(domains=["code", "wiki"]))
    made = hook(*plugins)(stream([9, 9], domain=True), "train")
    consistent(made)
    texts = sorted(["<|domain:code|>", "<|domain:wiki|>", *["<|fim_%s|>"]])
    assert texts[:2] == ["<|domain:code|>", "<|domain:wiki|>"]  # ids 1 and 2
    first, second, *_ = documents_of_row(made, 0)
    assert (first[:2], second[:2]) == ([0, 1], [0, 2])
    assert first[2] == second[2] == 4  # fim_middle 3, fim_prefix 4, fim_suffix 5


class Extra(Plugin, api=1):
    """A plugin that adds a field without declaring how it moves."""

    def build_data(self, data: Any) -> None:
        data.field("extra")
        data.rewrites()

    def on_batch(self, batch: Any) -> Any:
        return {**batch, "extra": batch["ids"] * 2}


def test_a_field_of_another_rewriter_is_refused() -> None:
    with pytest.raises(DataError, match=r"plugin 'fim': .* field 'extra'"):
        hook(Extra(), Fim())(stream([5]), "train")
    with pytest.raises(DataError, match="'extra'"):
        relaid({**stream([5]), "extra": np.zeros((2, T))}, [])


def read(by: str, *paths: Path, domains: tuple[str, ...] = ("code", "wiki")) -> list[Any]:
    files = find([str(path) for path in paths], lambda line: None)
    found = domains_of(files, Reading(VOCAB), by=by, domains=domains)
    return [(one.content, one.values["domain"]) for (one,) in found]


def test_domains_are_named_by_folder_file_or_key(tmp_path: Path) -> None:
    for name in ("wiki", "code"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "all.txt").write_text(f"text of {name}")
    assert read("folder", tmp_path) == [("text of code", 1), ("text of wiki", 2)]
    (tmp_path / "wiki.2024.txt").write_text("a page")
    assert read("file", tmp_path / "wiki.2024.txt") == [("a page", 2)]
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a", "kind": "code"}\n{"text": "b", "kind": "wiki"}\n')
    assert read("key:kind", lines) == [("a", 1), ("b", 2)]
    lines.write_text('{"text": "a", "kind": "code"}\n{"text": "b", "kind": "news"}\n')
    with pytest.raises(DataError, match="'news', not one of the domains") as refused:
        read("key:kind", lines)
    assert "line 2" in str(refused.value)
    with pytest.raises(DataError, match="domain 'lines' is not listed"):
        read("file", lines)
    with pytest.raises(DataError, match="does not name the domain"):
        read("key:kind", tmp_path / "wiki.2024.txt")


def test_a_file_that_is_read_in_pieces_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "wiki").mkdir()
    text = "räin in Spain\n" * 200_000
    for name in ("a", "b"):
        (tmp_path / "wiki" / f"{name}.txt").write_text(text, "utf-8")
    files = find([str(tmp_path)], lambda line: None)
    documents = domains_of(files, Reading(VOCAB), by="folder", domains=["wiki"])
    for pieces in (list(one) for one in documents):
        assert len(pieces) > 2
        assert "".join(map(str, (one.content for one in pieces))) == text
        assert [one.values["domain"] for one in pieces] == [1] * len(pieces)
    again = domains_of(files, Reading(VOCAB), by="folder", domains=["wiki"])
    assert sum(1 for _ in again) == 2


def test_a_run_by_the_clock_has_no_cooldown() -> None:
    with pytest.raises(minillm.PlanError, match="progress"):
        hook(DomainTokens(domains=["a"]), **{"train.steps": None, "train.minutes": 1.0})
