"""Tests of rendered plans, and of the differences between two."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from minillm_core.nn.decoding import EVERYTHING
from minillm_core.nn.module import Module
from minillm_core.plan import Plan
from minillm_core.plan.diff import ABSENT, difference, differences, in_words, render_diff
from minillm_core.plan.plan import as_json
from minillm_core.plan.render import amount, plan_document, render_plan, sized
from minillm_core.plan.slots import filled_slots, fold, ranges, slots_of
from minillm_core.plugins.layers import Layers
from minillm_core.plugins.plugin import Plugin
from minillm_modded.paired_heads import PairedHeads
from minillm_muon.muon import Muon

Planned = Callable[..., Plan]


class Gate(Module):
    def __init__(self, label: str = ""):
        super().__init__()

    def forward(self, y):
        return y


class Gates(Plugin, api=1):
    """Gates with a label."""

    label: str = "plain"

    def build_attention(self, attn):
        if attn.layer != 1:
            attn.out.gate(Gate, label=self.label)

    def build_model(self, model):
        model.mlp(2, None)
        model.residual("layers.0.in", "x0", 0.5)


def shown(plan: Plan, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    render_plan(plan, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def shown_difference(first: Plan, second: Plan, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    render_diff(first, second, console, ("", "a,b"))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_the_plan_is_one_look(planned: Planned, width: int) -> None:
    plan = planned(muon=Muon(), paired_heads=PairedHeads())
    text = shown(plan, width)
    lines = text.splitlines()
    assert width < 80 or len(lines) <= 45
    assert max(map(len, lines)) <= width
    assert plan.hash[:12] in text
    assert "layers 0-3" in text
    for word in ("muon.lr", "train.lr", "paired_heads", "Interleave", "28 parameters", "adamw"):
        assert word in text
    assert "none: paired_heads has no equivalent elsewhere" in " ".join(text.split())


def test_what_is_not_there_is_not_shown(planned: Planned) -> None:
    text = shown(planned())
    assert "plugin" not in text
    assert "muon" not in text
    assert "a llama directory" in text


class Remembers(Gate):
    lookback = EVERYTHING


class Again(Plugin, api=1):
    """Computes everything again."""

    def build_attention(self, attn):
        if attn.layer == 0:
            attn.out.gate(Remembers)


def test_what_is_computed_again_for_each_token_is_said(planned: Planned) -> None:
    text = " ".join(shown(planned(again=Again())).split())
    where = "layers.0.attention.out.again of 'again'"
    assert f"generation {where} computes all columns again for each token of a text" in text
    assert "generation" not in shown(planned(gates=Gates()))


def test_layers_that_differ_are_shown_apart(planned: Planned) -> None:
    text = " ".join(shown(planned(gates=Gates()), 140).split())
    assert "layers 0, 3" not in text  # layer 0 has a separate residual
    for layer in ("layer 0 attention", "layer 1 attention", "layer 2 attention"):
        assert layer in text
    assert "no MLP (gates)" in text
    assert "residual by gates" in text


@pytest.mark.slow
@settings(max_examples=10)
@given(label=st.text(max_size=20))
def test_what_plugins_say_cannot_command_a_terminal(planned: Planned, label: str) -> None:
    escape = f"\x1b]0;title\x07\x1b[2J\x9b1m{label}\u202e[bold]"
    plan = planned(gates=Gates(label=escape))
    for text in (shown(plan, 140), shown_difference(planned(), plan)):
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(text)
    assert "title" not in shown(plan, 200)
    assert "[bold]" in shown(plan, 200)  # markup is plain text


def test_the_document_names_the_plugins_that_are_named(planned: Planned) -> None:
    document = json.loads(json.dumps(plan_document(planned(muon=Muon())), allow_nan=False))
    assert set(document) == {"plan", "plan_hash", "plugins", "export"}
    assert [one["name"] for one in document["plugins"]] == ["muon"]
    assert document["plugins"][0]["options"]["lr"] == 0.02
    assert plan_document(planned())["plugins"] == []


class Scaled(Plugin, api=1):
    """Gates with a number."""

    by: float = 0.0

    def build_attention(self, attn):
        attn.out.gate(Gate, label=f"by={self.by}")


def test_numbers_are_read_at_six_digits_and_kept_at_all_of_theirs(planned: Planned) -> None:
    long = 0.036084391824351615
    plan, other = planned(scaled=Scaled(by=long)), planned(scaled=Scaled(by=0.5))
    for text in (shown(plan, 200), shown_difference(plan, other, 200)):
        assert "0.0360844" in text
        assert str(long) not in text
    assert plan.data()["plugins"]["scaled"]["by"] == long
    assert str(long) in json.dumps(plan.data()["model"]["spec"])
    assert str(long) in json.dumps(as_json(difference(plan, other)["slots"]))


def test_values_that_would_be_read_alike_are_shown_at_all_their_digits() -> None:
    near = {"a": (0.12345671, 0.12345672), "b": (0.12345671, 0.5)}
    assert in_words(near) == ("a: 0.12345671 -> 0.12345672", "b: 0.123457 -> 0.5")


def test_slots_of_a_plugin_are_a_line_each(planned: Planned) -> None:
    plan = planned(gates=Gates(), muon=Muon(), paired_heads=PairedHeads(layers=Layers([0, 2])))
    assert slots_of(plan, "gates") == (
        "attention.out.gate, layers 0, 2-3: Gate(label=plain)",
        "model.mlp, layer 2: none",
        "model.residual[in][x0], layer 0: 0.5",
    )
    assert slots_of(plan, "muon") == (
        "opt.assign[muon]: 25 parameters",
        "opt.rule[muon]: nesterov, newton_schulz, spectral, decay, write",
    )
    assert slots_of(plan, "paired_heads") == ("attention.layout, layers 0, 2: Interleave",)
    assert slots_of(plan, "absent") == ()


def test_a_difference_holds_what_differs_alone(planned: Planned) -> None:
    first = planned("train.steps=10", paired_heads=PairedHeads())
    second = planned("train.steps=20", muon=Muon())
    found = difference(first, second)
    assert [slot.owner for slot in found["slots"][0]] == ["paired_heads"]
    assert {slot.owner for slot in found["slots"][1]} == {"muon"}
    assert set(found["parts"]) == {"attention.scores"}
    assert found["rules"] == {"adamw": ((38, 33056), (10, 2336)), "muon": ((0, 0), (28, 30720))}
    assert set(found["schedules"]) == {"muon.lr"}
    assert found["export"] == (None, "llama")
    assert found["data"]["train.steps"] == (10, 20)
    json.dumps(as_json(found), allow_nan=False)
    text = shown_difference(first, second)
    assert re.split(r"\s{2,}", text.splitlines()[0].strip()) == ["as it is", "a, b"]
    for word in ("paired_heads", "-50.0%", "28 arrays", "train.steps: 10 -> 20", "+  muon"):
        assert word in text


def test_the_same_plan_has_no_difference(planned: Planned) -> None:
    plan = planned(muon=Muon())
    assert differences(plan.data(), planned(muon=Muon()).data()) == {}
    assert f"the same plan: {plan.hash[:12]}" in shown_difference(plan, plan)


def test_differences_are_put_in_words(planned: Planned) -> None:
    old, new = planned("train.steps=10"), planned("train.lr=0.5", "train.steps=20", muon=Muon())
    lines = in_words(differences(old.data(), json.loads(json.dumps(new.data()))))
    assert "train.steps: 10 -> 20" in lines
    assert "schedules.values.train.lr.peak: 0.003 -> 0.5" in lines
    assert 'optimizer.parameters.layers.0-3.attention.q.weight.rule: "adamw" -> "muon"' in lines
    (version,) = (line for line in lines if line.startswith("versions."))
    assert version.startswith(f"versions.muon: {ABSENT} -> ")
    assert all(len(line) < 200 for line in lines)


@pytest.mark.parametrize("setting", ["model.layers=3", "model.hidden=40", "data.seed=3"])
def test_every_difference_of_the_data_is_found(planned: Planned, setting: str) -> None:
    lines = in_words(differences(planned().data(), planned(setting).data()))
    key = setting.partition("=")[0]
    assert any(line.startswith(f"{key}: ") for line in lines)


@given(st.sets(st.integers(0, 60)))
def test_ranges_say_every_number(numbers: set[int]) -> None:
    said = [part.split("-") for part in ranges(numbers).split(", ") if part]
    assert {n for part in said for n in range(int(part[0]), int(part[-1]) + 1)} == numbers
    assert len(said) <= max(1, len(numbers))


def test_layers_that_are_alike_are_folded() -> None:
    entries = [(f"layers.{i}.mlp", i == 2) for i in range(4)] + [("norm", False)]
    assert fold(entries) == [
        ("layers.*.mlp", False, (0, 1, 3)),
        ("layers.*.mlp", True, (2,)),
        ("norm", False, ()),
    ]
    assert fold([("model.mlp[3]", 0), ("model.init[layers.1.mlp.up]", 0)]) == [
        ("model.mlp[*]", 0, (3,)),
        ("model.init[layers.*.mlp.up]", 0, (1,)),
    ]


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1_048_576, "1.05 M"), (2.5e12, "2.5 T")]
)
def test_amounts(number: float, text: str) -> None:
    assert amount(number) == text


def test_sizes() -> None:
    assert (sized(2**20), sized(3 * 2**30)) == ("1.0 MiB", "3.00 GiB")


def test_taken_slots_are_sorted_by_plugin(planned: Planned) -> None:
    owners = [entry.owner for entry in filled_slots(planned(muon=Muon(), gates=Gates()))]
    assert owners == sorted(owners)


def test_two_tables_stand_side_by_side_only_where_both_fit(planned: Planned) -> None:
    plan, beside = planned(), []
    for width in range(80, 141, 5):
        text = shown(plan, width)
        assert "attention.scores" in text
        beside.append(any("part" in line and "about" in line for line in text.splitlines()))
    assert beside == sorted(beside)
    assert not beside[0]
    assert beside[-1]


@pytest.mark.parametrize(
    ("given", "when"),
    [
        ("every=0", "at the end"),
        ("every=25", "at the start, after every 25 steps, and at the end"),
        ("every=1", "at the start, after every step, and at the end"),
        ("share=0.125", "at the start, after every sixth of the run, and at the end"),
    ],
)
def test_it_says_how_much_is_evaluated(planned: Planned, given: str, when: str) -> None:
    for best in (False, True):  # the best checkpoint is chosen by all predictions
        settings = f"eval.{given}", "eval.tokens=2048", f"checkpoint.best={str(best).lower()}"
        text = " ".join(shown(planned(*settings), 140).split())
        assert f"evaluation {when}, 2,048 predictions at most (eval.tokens)" in text
        early = given != "every=0" and not best
        assert ("12.5 % of them before the end" in text) == early


@pytest.mark.parametrize("width", [60, 80, 140])
def test_names_of_slots_are_never_cut(planned: Planned, width: int) -> None:
    plan = planned(muon=Muon(), paired_heads=PairedHeads(), gates=Gates())
    lines = shown(plan, width).splitlines()
    slots = [entry.slot for entry in filled_slots(plan)]
    assert slots
    assert [slot for slot in slots if not any(slot in line.split() for line in lines)] == []
