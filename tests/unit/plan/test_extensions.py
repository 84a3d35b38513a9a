"""Tests of plugins that extend rules, reads and targets of other plugins."""

from __future__ import annotations

from typing import Any

import pytest

from minillm_core import INHERITED, Module, Param, PlanError, Plugin, scheduled, stage, zeros
from minillm_core.config.load import load
from minillm_core.optim.adamw import decay
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin


def planned(**plugins: Plugin) -> Plan:
    sizes = ("model.layers=2", "model.dim=16", "model.hidden=8", "model.vocab=16")
    config = load(
        preset="tiny",
        assignments=[*sizes, "train.weight_decay=0.3"],
        default_preset=lambda: ("tiny", "test"),
    ).config
    return build_plan(config, [LoadedPlugin.of(name, one) for name, one in plugins.items()])


class Provider(Plugin, api=1):
    """Two rules: one with its own decay, one with a scheduled decay."""

    def optimizer_factory(self, optimizer):
        optimizer.rule("fixed", lr=1.0, weight_decay=0.7)
        optimizer.assign("fixed", lambda _, p: p.role.startswith("mlp"))
        optimizer.rule("moving", lr=1.0, weight_decay=scheduled(0.5))
        optimizer.assign("moving", lambda _, p: p.role == "norm")


class Extender(Plugin, api=1):
    """Replaces decays."""

    rules: tuple[str, ...] = ("*",)
    anchor: str = "decay"

    def optimizer_factory(self, optimizer):
        for rule in self.rules:
            optimizer.extend(rule, self.anchor, stage(decay, weight_decay=INHERITED))


def decays(plan: Plan) -> dict[str, tuple[str, dict[str, Any], dict[str, str]]]:
    return {
        name: (owner, dict(one.arguments), dict(one.values))
        for name, rule in plan.rules.items()
        for anchor, owner, one in rule.stages
        if anchor == "decay"
    }


def test_an_extension_of_every_rule_inherits_from_each() -> None:
    both = {"extender": Extender(), "provider": Provider()}
    for plugins in (both, dict(reversed(both.items()))):  # in either order
        plan = planned(**plugins)
        assert decays(plan) == {
            "adamw": ("extender", {"weight_decay": 0.3}, {}),
            "fixed": ("extender", {"weight_decay": 0.7}, {}),
            "moving": ("extender", {}, {"weight_decay": "moving.extender.weight_decay"}),
        }
        peak = max(
            plan.values(step / 100)["moving.extender.weight_decay"] for step in range(1, 101)
        )
        assert peak == pytest.approx(0.5)


def test_a_rules_own_decay_is_left_where_nobody_extends_it() -> None:
    found = decays(planned(provider=Provider(), extender=Extender(rules=("fixed",))))
    assert found["adamw"] == ("core", {"weight_decay": 0.3}, {})
    assert found["fixed"] == ("extender", {"weight_decay": 0.7}, {})
    assert found["moving"] == ("provider", {}, {"weight_decay": "moving.weight_decay"})


@pytest.mark.parametrize(
    ("plugins", "said"),
    [
        ({"a": Extender(), "b": Extender(rules=("adamw",))}, "claimed by both 'a' and 'b'"),
        ({"a": Extender(rules=("*", "adamw"))}, "plugin 'a' claims slot .* twice"),
        ({"a": Extender(anchor="scale")}, "no replaced stage has an argument 'weight_decay'"),
    ],
)
def test_extensions_that_clash_or_inherit_nothing_are_refused(
    plugins: dict[str, Plugin], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        planned(**plugins)


class Table(Module):
    """A stream."""

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        shape = (geometry.vocab, geometry.kv_heads * geometry.head_dim)
        self.weight = Param(shape, init=zeros, role="embedding.value")

    def forward(self, ids: Any) -> Any:
        return self.ops.embedding(ids, self.weight)


class Add(Module):
    """A term that reads ``table``, under whatever name."""

    def forward(self, v: Any, table: Any) -> Any:
        return self.ops.reshape(table, v.shape)


class Reader(Plugin, api=1):
    """Each layer reads its own stream through one class."""

    argument: str = "table"

    def build_attention(self, attn):
        attn.v(Add, reads={self.argument: f"table{attn.layer}"})

    def build_model(self, model):
        for layer in range(model.layers):
            model.stream(f"table{layer}", Table)


def test_one_class_reads_another_stream_in_each_layer() -> None:
    blocks = planned(reader=Reader()).spec.blocks
    found = [node.external for block in blocks for node in block.attention.v]  # type: ignore[union-attr]
    assert found == [("table0",), ("table1",)]


@pytest.mark.parametrize(
    ("argument", "said"), [("tabel", "forward takes v, table"), ("v", "gives")]
)
def test_a_read_that_nothing_takes_is_refused(argument: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        planned(reader=Reader(argument=argument))


class Leaves(Plugin, api=1):
    """A further target for a while."""

    until: float | None = None

    def compute_loss(self, loss):
        loss.target(0.5, offset=2, until=self.until)


@pytest.mark.parametrize(
    ("until", "present"), [(None, (1, 1, 1)), (1.0, (1, 1, 1)), (0.4, (1, 0, 0))]
)
def test_a_target_is_there_until_it_leaves(until: float | None, present: tuple[int, ...]) -> None:
    plan = planned(leaves=Leaves(until=until))
    found = [len(plan.spec.loss.present(plan.values(progress))) for progress in (0.4, 0.41, 1)]
    assert tuple(found) == present
    assert bool(plan.staged) == (until == 0.4)


@pytest.mark.parametrize("until", [0.0, -0.1, 1.1])
def test_a_target_leaves_within_the_run(until: float) -> None:
    with pytest.raises(PlanError, match="a share of the run"):
        planned(leaves=Leaves(until=until))
