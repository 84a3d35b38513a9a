"""docs/hooks.md is what the hook specifications and the builders say, and says all of it."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import minillm_core
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
from minillm_kit import hooks
from minillm_kit.subject import Subject, supervised
from tools.hooks_page import PAGE, made
from tools.reading import doc_of, members
from tools.slots import BUILDERS, Slot, slots

GEOMETRY = ModelShape(2, 32, 4, 2, 8, 48, 97, 16, layer=0)
OFFERED = [(hook, slot) for hook in BUILDERS for slot in slots(hook)]


def test_the_page_is_what_the_source_says() -> None:
    page = PAGE.read_text("utf-8")
    assert made(page) == page, "python -m tools.hooks_page --write"


def test_every_hook_has_a_chapter_and_every_link_a_heading() -> None:
    page = PAGE.read_text("utf-8")
    headings = {
        re.sub(r"[^-_a-z0-9 ]", "", text.lower()).replace(" ", "-")
        for text in re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    }
    assert set(HOOKS) <= headings
    assert set(re.findall(r"\]\(#(.+?)\)", page)) <= headings


def test_a_page_that_lacks_a_part_is_refused() -> None:
    page = PAGE.read_text("utf-8").replace("<!-- made: rules -->", "")
    with pytest.raises(ValueError, match="rules"):
        made(page)


@pytest.mark.parametrize(("hook", "slot"), OFFERED, ids=[slot.path for _, slot in OFFERED])
def test_an_example_can_be_typed(hook: str, slot: Slot) -> None:
    """It calls what it stands beside, with arguments that this takes, and public names."""
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
    """The function that ``attn.out.gate`` is."""
    found = {slot.path: slot for slot in slots(hook)}
    if name in found:
        return found[name].target
    path, _, anchor = name.removesuffix(".close").rpartition(".")
    assert anchor in found[path].anchors
    from minillm_core.plugins.builders.base import Anchor

    return Anchor.close if name.endswith(".close") else Anchor.__call__


def test_chains_give_the_names_that_the_page_says() -> None:
    attention = AttentionBuilder("you", ValueTable(), AttentionSlots(GEOMETRY, 10_000.0))
    model = ModelBuilder("you", ValueTable(), ModelSlots(GEOMETRY))
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
    """The files of the page, in a folder."""
    page = PAGE.read_text("utf-8")
    blocks = dict(re.findall(r"^```python title=(\S+)\n(.+?)^```$", page, re.M | re.S))
    assert {*blocks} == {"half_open.py", "whole_documents.py", "growing.py"}
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
