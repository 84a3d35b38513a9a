"""Tests of order and packer claims in the plan: data, hash, table, digests, and refusals."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from minillm_core import Packer, PlanError, Plugin, PluginCodeError, build_plan, load
from minillm_core.plan.why import matches
from minillm_core.plugins.manager import LoadedPlugin


class First(Packer):
    """The beginning of each document, in a row of its own."""

    def __init__(self, capacity: int, most: int = 8) -> None:
        super().__init__(capacity)
        if most < 1:
            raise ValueError("most is 1 at least")
        self.most = most

    def row(self, take: Any) -> Any:
        return [take().part(0, min(self.most, self.capacity))]


def backwards(lengths: np.ndarray, seed: int, epoch: int, *, by: int = 1) -> np.ndarray:
    return np.arange(len(lengths))[::-1]


class Rows(Plugin, api=1):
    """Claims the packer."""

    def __init__(self, target: Any = First, **given: Any) -> None:
        super().__init__()
        object.__setattr__(self, "_claims", (target, given))

    def build_data(self, data: Any) -> None:
        target, given = self._claims  # type: ignore[attr-defined]
        data.packer(target, **given)


class Others(Rows, api=1):
    """Claims the packer as well."""


class Sorted(Plugin, api=1):
    """Claims the order."""

    def build_data(self, data: Any) -> None:
        data.order(backwards, by=2)


def planned(**plugins: Plugin) -> Any:
    config = load("tiny", settings={"train.steps": 10, "train.seq_len": 16}).config
    return build_plan(config, [LoadedPlugin.of(name, one) for name, one in plugins.items()])


def test_a_plan_without_claims_has_no_word_of_them() -> None:
    plan = planned()
    assert plan.arrangement == {}
    assert {*plan.data()["data"]} == {"rows", "seq_len", "seed", "val"}
    held = {report.slot: report.held[0] for report in plan.table if report.slot.startswith("data.")}
    assert (held["data.order"].owner, held["data.packer"].owner) == ("core", "core")
    assert held["data.packer"].what == "end to end"


def test_claims_are_in_data_hash_digests_and_table() -> None:
    plan = planned(mine=Rows(most=3), yours=Sorted())
    data = json.loads(json.dumps(plan.data()))
    assert data["data"]["packer"] == ["mine", f"{__name__}:First", [["capacity", 17], ["most", 3]]]
    assert data["data"]["order"] == ["yours", f"{__name__}:backwards", [["by", 2]]]
    assert __name__ in plan.digests
    assert plan.hash != planned(mine=Rows(most=4), yours=Sorted()).hash != planned(mine=Rows()).hash
    (report,) = (one for one in plan.table if matches("data.packer", one))
    assert [(one.owner, one.what) for one in report.held] == [("mine", "First")]
    shown = {one.name: one.expected for one in plan.plugins}
    assert shown == {"mine": ("slot:data.packer",), "yours": ("slot:data.order",)}
    assert plan.export.layout == "llama"  # the model is the same function


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_two_claims_are_refused_with_both_names(names: tuple[str, str]) -> None:
    with pytest.raises(
        PlanError, match=r"slot data\.packer is claimed by both 'a' and 'b'"
    ) as refused:
        planned(**dict(zip(names, (Rows(), Others()), strict=True)))
    assert refused.value.slots == ("data.packer",)


def test_a_claim_needs_a_class_of_packers() -> None:
    with pytest.raises(PlanError, match="not a class derived from Packer"):
        planned(mine=Rows(backwards))


@pytest.mark.parametrize(
    ("given", "said"),
    [({"least": 3}, "unexpected keyword argument 'least'"), ({"most": 0}, "most is 1 at least")],
)
def test_what_a_packers_constructor_refuses_is_refused_while_planning(
    given: Any, said: str
) -> None:
    with pytest.raises(PluginCodeError, match="mine") as refused:
        planned(mine=Rows(**given))
    assert said in str(refused.value)


def test_arguments_are_json_and_the_target_is_found_again() -> None:
    class Local(First):
        """Defined in a function."""

    with pytest.raises(PlanError, match="cannot be referred to"):
        planned(mine=Rows(Local))
    with pytest.raises(PlanError, match="is not JSON"):
        planned(mine=Rows(most=np.int64(3)))
