"""Tests that docs/hooks.md covers all hook specifications and builders, and is up to date."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minillm_core
from minillm_core import (
    DataError,
    Evaluated,
    Rope,
    Run,
    build_plan,
    llama_frequencies,
    load,
)
from minillm_core.data import open_corpus
from minillm_core.inspection import Documents, Loader
from minillm_core.nn.node import ModelShape
from minillm_core.plugins.builders import (
    AttentionBuilder,
    AttentionSlots,
    ModelBuilder,
    ModelSlots,
)
from minillm_core.plugins.builders.base import ValueTable
from minillm_core.plugins.hookspecs import HOOKS
from minillm_kit import hooks, run_module
from minillm_kit.decoding import decodes
from minillm_kit.oracle import Oracle, referred, step_values
from minillm_kit.subject import Subject, supervised
from tools.hooks_page import PAGE
from tools.reading import doc_of, members
from tools.slot_usage import AS_IT_IS, IN_PART, NOT_AT_ALL, TRIED, YES
from tools.slots import BUILDERS, Slot, slots

GEOMETRY = ModelShape(2, 32, 4, 2, 8, 48, 97, 16, layer=0)
OFFERED = [(hook, slot) for hook in BUILDERS for slot in slots(hook)]


def test_the_page_is_what_the_source_says() -> None:
    assert PAGE.generated() == PAGE.text(), "python -m tools.hooks_page --write"


def test_every_hook_has_a_chapter_and_every_link_a_heading() -> None:
    page = PAGE.text()
    headings = {
        re.sub(r"[^-_a-z0-9 ]", "", text.lower()).replace(" ", "-")
        for text in re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    }
    assert set(HOOKS) <= headings
    assert set(re.findall(r"\]\(#(.+?)\)", page)) <= headings


@pytest.mark.parametrize(("hook", "slot"), OFFERED, ids=[slot.path for _, slot in OFFERED])
def test_an_example_can_be_typed(hook: str, slot: Slot) -> None:
    """It calls its slot, with accepted arguments, and uses public names."""
    example = doc_of(slot.target).example
    if not example:
        return
    calls = [node for node in ast.walk(ast.parse(example)) if isinstance(node, ast.Call)]
    own = [node for node in calls if ast.unparse(node.func).startswith(f"{slot.path}")]
    assert own, example
    for node in calls:
        name = ast.unparse(node.func)
        if name.startswith(f"{BUILDERS[hook][1]}."):
            target = _reached(hook, name)
            bound = inspect.signature(target)
            keywords = {one.arg: None for one in node.keywords if one.arg}
            bound.bind(*[None] * (len(node.args) + 1), **keywords)
        elif "." not in name and name[0].islower():
            assert name in minillm_core.__all__, name


def _reached(hook: str, name: str) -> Any:
    """Return the function of ``attn.out.gate``."""
    found = {slot.path: slot for slot in slots(hook)}
    if name in found:
        return found[name].target
    path, _, anchor = name.removesuffix(".close").rpartition(".")
    assert anchor in found[path].anchors
    from minillm_core.plugins.builders.base import Anchor

    return Anchor.close if name.endswith(".close") else Anchor.__call__


def test_chains_give_the_names_that_the_page_says() -> None:
    attention = AttentionBuilder("you", ValueTable(), AttentionSlots(GEOMETRY, 10_000.0))
    model = ModelBuilder("you", ValueTable(), ModelSlots(GEOMETRY, 10_000.0))
    chains = [(hook, slot) for hook, slot in OFFERED if slot.anchors]
    assert len(chains) == 3
    for _, slot in chains:
        _, given, _ = slot.parts
        names = tuple(re.sub(r" \(.*?\)", "", given).split(", "))
        for anchor in slot.anchors:
            home: Any = {"attn": attention, "model": model}[slot.path.partition(".")[0]]
            for part in (*slot.path.split(".")[1:], anchor):
                home = getattr(home, part)
            assert home._own == names


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    """Write the page's files into a folder."""
    page = PAGE.text()
    blocks = dict(re.findall(r"^```python title=(\S+)\n(.+?)^```$", page, re.M | re.S))
    files = {"half_open.py", "whole_documents.py", "answers.py", "distil.py", "growing.py"}
    files |= {"hard_words.py", "one_key.py", "polyak.py"}
    assert {*blocks} == files
    for name, code in blocks.items():
        (tmp_path / name).write_text(code)
    return tmp_path


@pytest.mark.parametrize("descending", [False, True])
def test_the_packer_and_the_order_on_the_page_lay_out_rows(plugins: Path, descending: bool) -> None:
    file = f"{plugins / 'whole_documents.py'}:WholeDocuments"
    subject = Subject(file, {"descending": descending}, backend="torch")
    plan = subject.planned(train_seq_len=6)
    sizes = {"rows": 5, "accumulate": 1, "seq_len": 6, "seed": 0}
    documents = Documents.of([[n] * n for n in (4, 1, 9, 2, 3)], 10)
    with Loader(documents, **sizes, by=plan.arrangement) as loader:
        step = next(loader)
    rows = ["".join(map(str, row)).rstrip("0") for row in step.micro[0]["ids"]]
    short, long = ["122333", "4444", "999999", "122333"], ["999999", "444433", "221", "999999"]
    assert rows[:4] == (long if descending else short)
    assert hooks.batches(subject).startswith("order and packer: ")


def test_the_source_on_the_page_gives_answers_to_learn(plugins: Path, tmp_path: Path) -> None:
    subject = Subject(f"{plugins / 'answers.py'}:Answers", {"ends": 0.5}, backend="torch")
    plan = subject.planned(train_seq_len=16)
    lines = [{"question": f"What is {n}?", "answer": f"A number, {n}."} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    config = plan.config.data.model_copy(update={"paths": (str(tmp_path / "a.jsonl"),)})
    given = {"cache": tmp_path / "cache", "say": lambda line: None, "asked": plan.sourcing}
    corpus = open_corpus(config, 400, 16, **given)
    assert corpus.tokenizer is not None
    with Loader(corpus.train, rows=8, accumulate=1, seq_len=16, seed=0) as loader:
        batch = next(loader).micro[0]
    labels = batch["labels"][batch["labels"] >= 0]
    learnt = corpus.tokenizer.decode(labels, specials=True)
    assert "A number, " in learnt
    assert "<|stop|>" in learnt
    assert "What" not in learnt
    assert "<|answer|>" not in learnt
    stops = batch["labels"] == corpus.specials["stop"]
    assert (batch["weights"][stops] == 0.5).all()
    (tmp_path / "a.jsonl").write_text('{"question": "Why?"}\n' * 40)
    with pytest.raises(DataError, match="no question with an answer"):
        open_corpus(config, 400, 16, **given)


def test_the_verdict_on_the_page_ends_a_run(plugins: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"{n} is a number, not a rhythm." for n in range(600)))
    sizes = {"model.layers": 1, "model.dim": 16, "model.heads": 2, "model.kv_heads": 2}
    more = {"model.hidden": 16, "model.vocab": 300, "train.seq_len": 16, "train.rows": 2}
    asked = {"train.steps": 4, "eval.every": 2, "backend": "torch", "device": "cpu"}
    for enough, steps in ((20.0, 0), (0.0, 4)):
        settings = {**sizes, **more, **asked, "hard_words.enough": enough}
        words = {"plugins": f"{plugins / 'hard_words.py'}:HardWords", "data": str(text)}
        run = Run(build_plan(load(preset="tiny", settings=settings, **words)))
        found = [event for event in run.steps() if isinstance(event, Evaluated)]
        assert run.step == steps
        assert found[-1].verdicts["hard_words.nats"] > 3
        assert found[-1].stop == ("hard_words: the words are known" if enough else "")


def test_batches_of_the_plugin_on_the_page_grow(plugins: Path) -> None:
    subject = Subject(f"{plugins / 'growing.py'}:Growing", backend="torch")
    plan = subject.planned(train_rows=8)
    assert {shape.rows: steps for shape, steps in plan.course.items()} == {2: 5, 4: 5, 6: 5, 8: 5}
    assert hooks.batches(subject).startswith("shapes: ")


def test_the_plugin_on_the_page_trains(plugins: Path) -> None:
    subject = Subject(f"{plugins / 'half_open.py'}:HalfOpen", backend="torch")
    plan = subject.plan()
    run, micro = subject.trainer(plan, "torch"), subject.batches(plan, 1)
    result = run.read(run.step(micro, plan.values(0.5), supervised(micro)))
    assert 0 < result.terms["openness"] < 2 * 4 * 0.01  # two layers of four nearly half open heads
    biases = [value for name, value in run.arrays().items() if name.startswith("state.")]
    assert [value.shape for value in biases] == [(4,), (4,)]
    assert all(value.any() for value in biases)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_the_average_on_the_page_is_the_mean_of_all_weights(plugins: Path, backend: str) -> None:
    subject = Subject(f"{plugins / 'polyak.py'}:Polyak", backend=backend)
    plan = subject.plan()
    run, (batch,) = subject.trainer(plan, backend), subject.batches(plan, 1)
    seen = [run.arrays()]
    for step in range(3):
        run.read(run.step([batch], plan.values((step + 1) / 20), supervised([batch])))
        seen.append(run.arrays())
    for name in plan.parameters:
        np.testing.assert_array_equal(seen[0][f"view.{name}"], seen[0][f"model.{name}"])
        mean = np.mean([arrays[f"model.{name}"] for arrays in seen[1:]], 0)
        np.testing.assert_allclose(seen[3][f"view.{name}"], mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_the_distillation_on_the_page_nears_its_teacher(plugins: Path, backend: str) -> None:
    subject = Subject(
        f"{plugins / 'distil.py'}:Distil", {"temperature": 1.0, "weight": 1e3}, backend=backend
    )
    plan = subject.plan()
    run, (batch,) = subject.trainer(plan, backend), subject.batches(plan, 1)
    oracle = Oracle(subject, plan, stirred=False)
    (teacher,) = referred(plan, batch).values()
    ours = oracle.model.all_logits(dict(batch), step_values(plan, batch))
    ours, theirs = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (ours, teacher))
    apart = (np.exp(theirs) * (theirs - ours)).sum(-1)[batch["labels"] >= 0].mean()
    terms = []
    for _ in range(20):
        terms.append(run.read(run.step([batch], plan.values(0.2), supervised([batch]))).terms)
    assert terms[0]["distil"] == pytest.approx(apart, rel=1e-4)
    assert terms[-1]["distil"] < 0.5 * terms[0]["distil"]
    plain = subject.trainer(subject.plan(without=True), backend)
    assert run.arrays().keys() == plain.arrays().keys()


def test_the_rotation_on_the_page_turns_pairs_by_its_base(plugins: Path) -> None:
    """Scores are those of complex numbers, turned by position times base^(-2i/D); decoding gives the same."""
    file, base = f"{plugins / 'one_key.py'}:OneKey", 50.0
    subject = Subject(file, {"base": base, "layers": [0]}, backend="torch")
    assert decodes(subject).startswith("logits apart by torch")
    cls = sys.modules[subject.found.cls.__module__].Shared
    x = np.random.default_rng(0).standard_normal((1, 5, GEOMETRY.dim))
    (found, kept), weights = run_module(cls, {"base": base}, x=x, kv=None)
    heads, half = GEOMETRY.heads, GEOMETRY.head_dim // 2
    turn = np.exp(1j * np.outer(np.arange(5), base ** (-np.arange(half) / half)))  # (T, D/2)

    def complex_of(array: np.ndarray) -> np.ndarray:
        return turn * (array[..., :half] + 1j * array[..., half:])

    k, v = np.split(x[0] @ weights["kv.weight"].T, 2, -1)
    q = np.split(x[0] @ weights["q.weight"].T, heads, -1)
    made = []
    for one in q:
        scores = np.real(complex_of(one) @ complex_of(k).conj().T) / np.sqrt(GEOMETRY.head_dim)
        shares = np.where(np.tri(5, dtype=bool), np.exp(scores), 0.0)
        made.append(shares / shares.sum(-1, keepdims=True) @ v)
    expected = np.concatenate(made, -1) @ weights["o.weight"].T
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)  # tables are float32
    assert kept.shape == (1, 5, 2, GEOMETRY.head_dim)
    table = Rope(llama_frequencies(4, base), 3)
    assert [one.shape for one in (table.cos, table.sin, table.frequencies)] == [
        (3, 2),
        (3, 2),
        (2,),
    ]


def test_every_technique_that_was_tried_has_its_row_and_its_reason(repository: Path) -> None:
    assert len(TRIED) == len({one.technique for one in TRIED}) == 46
    section = (repository / "docs" / "authoring.md").read_text()
    section = section.partition("## What a plugin cannot say")[2].partition("\n## ")[0]
    assert {one.sayable for one in TRIED} == {AS_IT_IS, IN_PART, NOT_AT_ALL}
    for one in TRIED:
        sayable = one.sayable == AS_IT_IS
        assert sayable == (not one.why), one.technique
        assert sayable or f"\n- **{one.under}" in section, one.technique
    page = PAGE.text()
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (as it is|partly|not) \|", page, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == [*range(1, 47)]
    as_it_is = sum(sayable == AS_IT_IS for _, _, sayable in rows)
    assert f"**{as_it_is} can be expressed as they are, " in page


def test_the_plugins_of_techniques_that_were_tried_are_in_the_table_of_slots() -> None:
    modules = {one.where for one in YES}
    assert all(
        where in modules or where == "title=distil.py" for one in TRIED for where in one.where
    )


def test_docstrings_are_read_in_their_parts() -> None:
    class Shown:
        """First line, with ``code`` and :class:`~other.Name`.

        A second
        paragraph.

        ::

            call(1)

        Args:
            one: the first,
                on two lines.
            **two: others.

        Returns:
            What it is: this.

        Raises:
            ValueError: it is wrong.
        """

        width: int = 3  # of it
        kind: str
        """The other."""
        _hidden: int = 0

    doc = doc_of(Shown)
    assert doc.summary == "First line, with `code` and `other.Name`."
    assert (doc.body, doc.example) == (["A second paragraph."], "call(1)")
    assert doc.sections["Args"] == [("one", "the first, on two lines."), ("two", "others.")]
    assert doc.sections["Returns"] == [("", "What it is: this.")]
    assert doc.sections["Raises"] == [("ValueError", "it is wrong.")]
    stated = [(one.name, one.annotation, one.default, one.about) for one in members(Shown)]
    assert stated == [("width", "int", "3", "of it"), ("kind", "str", "", "The other.")]


def test_what_makes_the_page_is_in_no_wheel(repository: Path) -> None:
    assert (repository / "tools" / "hooks_page.py").is_file()
    assert 'packages = ["minillm_core"]' in (repository / "pyproject.toml").read_text()
