"""Plans that several processes refuse, by their number and by parallelism axis."""

from __future__ import annotations

import pytest

from minillm_core import ConfigError, Plan, PlanError, build_plan, load
from minillm_mesh.step_checks import check


def planned(plugins: str | None = None, **settings: object) -> Plan:
    given = {key.replace("_", ".", 1): value for key, value in settings.items()}
    return build_plan(load(preset="tiny", plugins=plugins, settings=given))


@pytest.mark.parametrize(
    ("rows", "accumulate", "ranks", "instead"),
    [(8, 6, 4, None), (3, 2, 4, "3"), (8, 6, 5, "4 or 6"), (1, 1, 2, "1"), (6, 4, 100, "6")],
)
def test_the_numbers_next_to_one_that_does_not_fit_are_named(
    rows: int, accumulate: int, ranks: int, instead: str | None
) -> None:
    plan = planned(train_rows=rows, train_accumulate=accumulate)
    if instead is None:
        check(plan, ranks)
        return
    with pytest.raises(ConfigError, match="cannot divide a step") as refused:
        check(plan, ranks)
    words = "process" if instead == "1" else "processes"
    assert refused.value.fix == f"make either a multiple of {ranks}, or take {instead} {words}"
    for number in map(int, instead.split(" or ")):
        check(plan, number)


def test_processes_are_counted_where_several_share_a_part() -> None:
    plan = planned(mesh_tensor=2, train_rows=5, train_accumulate=1)
    with pytest.raises(ConfigError, match="3 data-parallel parts of 2 processes cannot") as refused:
        check(plan, 6)
    assert refused.value.fix == "make either a multiple of 3, or take 2 or 10 processes"
    check(plan, 2)
    check(plan, 10)


def test_the_parts_of_a_step_can_be_demanded() -> None:
    check(planned(mesh_data=2, mesh_context=2, train_rows=4), 4)
    check(planned(mesh_data=0, train_rows=4), 4)
    with pytest.raises(
        ConfigError, match="4 processes, 2 per data-parallel part, make 2 parts, not the 4 of"
    ) as one:
        check(planned(mesh_data=4, mesh_context=2, train_rows=4), 4)
    assert one.value.fix == "8 processes, or mesh.data=2; 0 takes as many as there are"


def test_sizes_that_a_plugin_brings_are_looked_at() -> None:
    plan = planned("batch_schedule", train_rows=6)
    sizes = {shape.rows for shape in plan.course}
    assert len(sizes) > 1
    check(plan, 2)
    with pytest.raises(ConfigError, match=rf"micro-batch(es)? of {min(sizes)} rows?"):
        check(plan, 6)


def test_a_choice_in_a_whole_micro_batch_is_refused_where_its_rows_are_divided() -> None:
    check(planned("jest", train_accumulate=2), 2)
    with pytest.raises(PlanError, match="whole micro-batch") as refused:
        check(planned("jest", train_rows=4), 2)
    assert refused.value.where == "loss of 'jest', 2 processes"
