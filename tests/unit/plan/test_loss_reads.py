"""Tests of reads and choices of loss nodes: references, weights, rows; and of refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import (
    FrozenModel,
    Module,
    Param,
    PlanError,
    Plugin,
    PluginCodeError,
    build_plan,
    option,
    zeros,
)
from minillm_core.inspection import LoadedPlugin, trainer
from minillm_core.plan import Plan
from minillm_kit.oracle import materialise, step_values
from minillm_kit.subject import rows, settings, supervised, with_stand_ins

BACKENDS = ("torch", "mlx")


class FirstHalf(Module):
    """Weights of 2 in the first half of a row."""

    def forward(self, losses):
        length = losses.shape[1]
        half = self.ops.astype(self.ops.arange(length) < length // 2, "float32")
        return self.ops.broadcast_to(half * 2.0, losses.shape)


class Learns(Module):
    def __init__(self):
        super().__init__()
        self.scale = Param((1,), init=zeros, role="scalar")

    def forward(self, losses):
        return losses * self.scale


class ByRow(Module):
    def forward(self, losses):
        return self.ops.sum(losses, 1)


class Emits(Module):
    terms = ("more",)

    def forward(self, losses):
        return losses, self.ops.sum(losses)


class Teacher(Module):
    def forward(self, teacher):
        return self.ops.mean(teacher)


class Reads(Plugin, api=1):
    """Refers to a model, and reads it as its options set."""

    name: str = option("teacher", help="of the field")
    gives: str = option("losses", help="of the model")
    place: str = option("term", help="where it is read")

    def build_model(self, model):
        if self.place == "stream":
            model.stream("seen", Teacher)

    def compute_loss(self, loss):
        loss.reference(self.name, FrozenModel("nowhere"), gives=self.gives)
        if self.place == "term":
            loss.term("teacher", Teacher)


class Weighs(Plugin, api=1):
    """Weighs positions."""

    by: str = option("FirstHalf", help="a class")

    def compute_loss(self, loss):
        loss.weights(globals()[self.by])


class Keeps(Plugin, api=1):
    """Keeps rows."""

    by: str = option("ByRow", help="a class")

    def compute_loss(self, loss):
        loss.rows(globals()[self.by], keep=0.34)


class Field(Plugin, api=1):
    """Predicts the labels again, with a weight by position."""

    by: str = option("share", help="the field")

    def build_data(self, data):
        data.field("again", "int32")
        data.field("share", "float32")

    def on_batch(self, batch):
        share = np.linspace(0, 1, batch["ids"].size, dtype=np.float32).reshape(batch["ids"].shape)
        return {**batch, "again": batch["labels"], "share": share}

    def compute_loss(self, loss):
        loss.target(0.5, field="again", weight_field=self.by)


class Refers(Plugin, api=1):
    """Passes an invalid reference."""

    def compute_loss(self, loss):
        loss.reference("teacher", "runs/teacher")


def planned(*plugins: Plugin, **changed: Any) -> Plan:
    """Return plans of the small model, with stand-ins for reference models."""
    held = [LoadedPlugin.of(type(one).__name__.lower(), one) for one in plugins]
    return with_stand_ins(build_plan(settings(**changed), held), settings(**changed))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"name": "labels"}, "'labels' is a reserved name"),
        ({"name": "head"}, "'head' is a reserved name"),
        ({"name": "train.lr"}, "not the name of an argument"),
        ({"gives": "hidden"}, "a model gives no 'hidden'"),
        ({"place": "stream"}, "reads 'teacher', which nothing provides there"),
    ],
)
def test_a_reference_that_cannot_be_is_refused(given: dict[str, str], what: str) -> None:
    with pytest.raises(PlanError, match=what) as refused:
        planned(Reads(**given))
    assert "reads" in str(refused.value)


def test_two_meanings_of_a_name_are_refused() -> None:
    with pytest.raises(PlanError, match="the reference 'share' has a name that is taken"):
        planned(Reads(name="share", place=""), Field())
    made = {"one": Reads(place=""), "two": Reads(place="", gives="logits")}
    twice = [LoadedPlugin.of(name, plugin) for name, plugin in made.items()]
    with pytest.raises(PlanError, match="added by both 'one' and 'two'"):
        build_plan(settings(), twice)
    with pytest.raises(PlanError, match="is not a frozen model") as refused:
        planned(Refers())
    assert "FrozenModel(folder)" in str(refused.value)


@pytest.mark.parametrize("plugin", [Weighs(by="Learns"), Keeps(by="Learns")])
def test_parameters_that_no_gradient_reaches_are_refused(plugin: Plugin) -> None:
    with pytest.raises(PlanError, match="a parameter of Learns gets no gradient"):
        planned(plugin)


@pytest.mark.parametrize("plugin", [Weighs(by="Emits"), Keeps(by="Emits")])
def test_nodes_of_the_loss_have_a_result_alone(plugin: Plugin) -> None:
    with pytest.raises(PlanError, match="emits more than its result"):
        planned(plugin)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("plugin", "shapes"),
    [(Weighs(by="ByRow"), r"\(3,\).*\(3, 13\)"), (Keeps(by="FirstHalf"), r"\(3, 13\).*\(3,\)")],
)
def test_a_result_of_another_shape_names_the_plugin(
    plugin: Plugin, shapes: str, backend: str
) -> None:
    plan = planned(plugin)
    (batch,) = rows(plan.config, 1)
    run = trainer(plan, backend)
    with pytest.raises(PluginCodeError, match=r"(?s)" + shapes) as raised:
        run.read(run.step([batch], plan.values(0.5), supervised([batch])))
    assert type(plugin).__name__.lower() in str(raised.value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("plugins", [(Weighs(), Keeps()), (Field(),), (Weighs(), Field())])
def test_weights_rows_and_fields_together_are_those_of_numpy(
    plugins: tuple[Plugin, ...], backend: str
) -> None:
    """Reported losses are plain; the objective includes weights and rows."""
    plan = planned(*plugins)
    (batch,) = rows(plan.config, 1)
    for one in plugins:
        batch = one.on_batch(batch) if isinstance(one, Field) else batch
    model, values = materialise(plan, 0), step_values(plan, batch)
    plain = model.losses(dict(batch), values)
    there, weights = batch["labels"] >= 0, np.ones(plain.shape)
    kept = np.ones(len(plain), bool)
    if any(isinstance(one, Keeps) for one in plugins):
        kept = np.arange(len(plain)) == plain.sum(1).argmax()
    if any(isinstance(one, Weighs) for one in plugins):
        weights = np.where(np.arange(plain.shape[1]) < plain.shape[1] // 2, 2.0, 0.0)
    if any(isinstance(one, Field) for one in plugins):
        weights = weights + 0.5 * batch["share"]
    expected = (plain * weights)[kept].sum() / there[kept].sum()
    loss = model(dict(batch), values)
    assert float(loss.objective) == pytest.approx(expected)
    run = trainer(plan, backend)
    result = run.read(run.step([batch], plan.values(1 / 20), supervised([batch])))
    assert result.loss == pytest.approx(plain.sum() / there.sum(), rel=1e-5)
    assert run.evaluate([batch])[1] == there.sum()


def test_the_folder_of_a_reference_is_not_in_the_plan() -> None:
    def of(path: str, share: float) -> Plan:
        from minillm_data.rho1 import Rho1

        held = LoadedPlugin.of("rho1", Rho1(model=path, share=share))
        return build_plan(settings(), [held])

    assert of("here", 0.5).hash == of("there", 0.5).hash != of("here", 0.4).hash
