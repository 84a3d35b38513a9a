"""Tests of parameter groups: every parameter once, equal ones together where the rule stacks."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from minillm_core.optim.groups import Member, groups_of
from minillm_core.optim.narrow import Storage
from minillm_core.optim.stage import Rule, stage


def kept(ops: Any, update: Any, param: Any, state: Any, *, beta1: float = 0.9) -> Any:
    return update, state


def rule(name: str, needs: str) -> Rule:
    draft = stage(kept, state={"m": "like", "n": "scalar"}, needs=needs, beta1=0.9)
    return Rule(name, "core", (("precondition", "core", draft.named(name)),))


ALONE, STACKED = rule("alone", "element"), rule("stacked", "matrix")
member = st.tuples(
    st.sampled_from([ALONE, STACKED]),
    st.sampled_from([(4, 2), (2, 4), (3,)]),
    st.sampled_from([(), (("beta1", 0.5),)]),
    st.sampled_from([1.0, 0.1]),
)


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=3), member, max_size=12))
def test_every_parameter_is_in_one_group_with_its_like(
    drawn: dict[str, tuple[Rule, tuple[int, ...], Any, float]],
) -> None:
    assigned = {
        name: (one, Member(name, shape, lr_mul, 1.0, overrides))
        for name, (one, shape, overrides, lr_mul) in drawn.items()
    }
    groups = groups_of(assigned)
    assert sorted(m.name for group in groups for m in group.members) == sorted(drawn)
    for group in groups:
        assert len({m.shape for m in group.members}) == 1
        assert len({m.overrides for m in group.members}) == 1
        assert {drawn[m.name][0].name for m in group.members} == {group.rule.name}
        assert [m.name for m in group.members] == sorted(m.name for m in group.members)
        beta1 = dict(group.members[0].overrides).get("beta1", 0.9)
        assert dict(group.rule.stages[0][2].arguments) == {"beta1": beta1}
        stacked = group.rule.name == "stacked"
        assert stacked or len(group.members) == 1
        lead = (len(group.members),) if stacked else ()
        ones = (1,) * len(group.shape)
        shapes = {"m": (*lead, *group.shape), "n": (*lead, *ones)}
        (held,) = group.state_arrays().items()
        assert held == ("precondition", {name: Storage(shape) for name, shape in shapes.items()})
    keys = [(g.rule.name, g.shape, g.members[0].overrides) for g in groups if g.rule.stacked]
    assert len(set(keys)) == len(keys)
    shuffled = dict(sorted(assigned.items(), reverse=True))
    assert groups_of(shuffled) == groups
