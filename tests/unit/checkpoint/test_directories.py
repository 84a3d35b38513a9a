"""Tests of model directory formats: the format that reads or writes a directory, and errors without one."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from minillm_core.checkpoint import directories
from minillm_core.checkpoint.directories import (
    DirectoryFormat,
    export_checked,
    exporting,
    format_of,
    read_directory,
)
from minillm_core.errors import PlanError, PluginError, Refusal
from minillm_core.nn.module import Module
from minillm_core.plan import Plan
from minillm_core.plan.render import exportable
from minillm_core.plugins import discover
from minillm_core.plugins.plugin import Plugin
from minillm_core.train.initial import initial_layer
from minillm_core.train.run import Run

Planned = Callable[..., Plan]
Offer = Callable[..., None]


class Format(DirectoryFormat):
    """Recognises folders by a file, and reads their names."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def recognises(self, path: Path) -> bool:
        return (path / self.mark).exists()

    def read(self, path: Path) -> Any:
        return f"{self.mark} of {path.name}"

    def check(self, plan: Plan) -> None:
        if plan.config.model.tied:
            raise PlanError("it is tied", where="model.tied", fix="untie it")

    def write(self, folder: Path, model: Any, say: Any, **options: Any) -> int:
        return 0


A, B, NEITHER = Format("a.json"), Format("b.json"), object()


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Offer:
    """Replace the installed entry points: layout=name of this module."""

    def put(*layouts: tuple[str, str]) -> None:
        made = [EntryPoint(one, f"{__name__}:{name}", directories.GROUP) for one, name in layouts]
        monkeypatch.setattr(EntryPoint, "load", lambda one: globals()[one.value.split(":")[1]])
        for where in (directories, discover):
            monkeypatch.setattr(where, "entry_points", lambda group: made)

    return put


def test_a_directory_is_read_by_the_format_that_recognises_it(tmp_path: Path, offer: Offer) -> None:
    offer(("one", "A"), ("two", "A"), ("three", "B"))
    assert read_directory(tmp_path) is None
    (tmp_path / "b.json").touch()
    assert read_directory(tmp_path) == f"b.json of {tmp_path.name}"
    assert (format_of("two"), format_of("three"), format_of("four")) == (A, B, None)


def test_what_is_offered_twice_or_is_no_format_is_refused(tmp_path: Path, offer: Offer) -> None:
    offer(("one", "A"), ("one", "B"), ("two", "NEITHER"))
    with pytest.raises(PluginError, match="several distributions have the layout one"):
        format_of("one")
    for call in (lambda: format_of("two"), lambda: read_directory(tmp_path)):
        with pytest.raises(PluginError, match=r"is not a minillm_core\.directories\.Dir"):
            call()


def test_a_claim_is_checked_by_the_format_of_its_layout(planned: Planned, offer: Offer) -> None:
    offer(("llama", "A"))
    untied, tied = planned("model.tied=false"), planned("model.tied=true")
    assert export_checked(untied) is untied
    assert exporting(untied) is A
    checked = export_checked(tied)
    assert exportable(checked) == "none: it is tied (model.tied)"
    assert checked.hash == tied.hash
    with pytest.raises(PlanError, match="it is tied"):
        exporting(tied)


class Same(Module):
    def forward(self, y):
        return y


class Other(Plugin, api=1, export="other"):
    """A layout that nothing here writes."""

    def build_attention(self, attn):
        attn.out.gate(Same)


def test_a_layout_that_nobody_writes_is_said_by_the_plan(planned: Planned, offer: Offer) -> None:
    offer(("llama", "A"))
    plan = export_checked(planned(other=Other()))
    assert exportable(plan) == "none: no installed distribution writes the layout other"


def test_without_a_format_a_claim_stands_and_the_pip_line_is_said(
    tmp_path: Path, planned: Planned, offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer()
    monkeypatch.setattr(directories, "installing", lambda names: f"pip install {names[0]}")
    plan = planned()
    assert export_checked(plan) is plan
    with pytest.raises(Refusal, match="holds no run"):
        Run.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    opened = (lambda: initial_layer(str(tmp_path)), lambda: Run.open(tmp_path))
    for call in (lambda: exporting(plan), *opened):
        with pytest.raises(PluginError, match="no installed distribution does that") as found:
            call()
        assert found.value.fix == "pip install minillm-hf"
        assert found.value.exit_code == 2
