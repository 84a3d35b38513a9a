"""Tests of changing batch sizes: train.stages and the claim data.shapes, in settings, plan and estimate."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core import ConfigError, Packer, PlanError, Plugin, PluginCodeError, build_plan, load
from minillm_core.config.schema import Shape
from minillm_core.config.values import read_value
from minillm_core.plan import Plan
from minillm_core.plan.plan import variants_of
from minillm_core.plugins.manager import LoadedPlugin

SIZES = {"train.steps": 8, "train.rows": 4, "train.seq_len": 32}
STAGES = [{"until": 0.25, "rows": 16, "seq_len": 8}, {"until": 0.5, "accumulate": 3}]


def planned(plugins: dict[str, Plugin] | None = None, **settings: Any) -> Plan:
    given = SIZES | {key.replace("_", ".", 1): value for key, value in settings.items()}
    if "train.minutes" in given:
        del given["train.steps"]
    loaded = [LoadedPlugin.of(name, one) for name, one in (plugins or {}).items()]
    return build_plan(load("tiny", settings=given).config, loaded)


def by_turns(step: int, steps: int, seed: int, *, of: int) -> int:
    return (step + seed) % of


def wild(step: int, steps: int, seed: int, *, answer: Any) -> Any:
    return answer if step == 5 else 0


class Sized(Plugin, api=1):
    """Claims the shapes."""

    def __init__(self, function: Any = by_turns, shapes: Any = None, **given: Any) -> None:
        super().__init__()
        object.__setattr__(self, "_claim", (function, shapes, given))

    def build_data(self, data: Any) -> None:
        function, shapes, given = self._claim  # type: ignore[attr-defined]
        shapes = shapes or [(2 * data.rows, data.seq_len // 2), (data.rows, data.seq_len)]
        data.shapes(function, shapes, **(given or {"of": len(shapes)}))


class Sized2(Sized, api=1):
    """Claims them as well."""


class Fixed(Packer):
    """A packer with rows of one length."""

    def row(self, take: Any) -> Any:
        return [take().part(0, self.capacity)]


class Any_(Fixed):
    """A packer with rows of any length."""

    any_capacity = True


class Packs(Plugin, api=1):
    """Claims the packer."""

    changes: bool = False

    def build_data(self, data: Any) -> None:
        data.packer(Any_ if self.changes else Fixed)


class Ahead(Plugin, api=1):
    """Predicts twelve tokens ahead."""

    def compute_loss(self, loss: Any) -> None:
        loss.target(0.5, offset=12)


class Windowed(Plugin, api=1):
    """Two windows, the second from the middle on."""

    def build_attention(self, attn: Any) -> None:
        from minillm_core import stages

        attn.window(stages((0, 4), (0.5, 16)))


# the settings


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (
            [{"until": 0.5, "rows": 0}],
            "rows of stage 1 must be a whole number of at least 1, not 0",
        ),
        ([*STAGES, {"until": 0.9, "rows": 1.5}], "rows of stage 3 must be a whole number"),
        ([{"until": 1.5, "rows": 2}], "until of stage 1 must be a number above 0 and at most 1"),
        ([{"rows": 2}], "until of stage 1 must be a number above 0 and at most 1, not {rows = 2}"),
        ([{"until": 0.5, "row": 2}], "train.stages must be a stage or a list of stages"),
        ("0.5", "train.stages must be a stage or a list of stages"),
        ([{"until": 0.5}], "stage 1, which ends at 0.5 of the run, changes nothing"),
        (STAGES[::-1], "no step falls into stage 2, which ends at 0.25 of the run"),
        ([{"until": 0.1, "rows": 2}], "no step falls into stage 1, which ends at 0.1"),
        ([{"until": 0.1, "rows": 2}], "fix:   more steps"),
        ([{"until": 0.5, "seq_len": 33}], "stage 1, which ends at 0.5 of the run, has rows of 33"),
        ([{"until": 0.5, "rows": 2**40}], "is more than any machine holds"),
    ],
)
def test_stages_that_cannot_be_are_refused_while_loading(stages: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("tiny", settings=SIZES | {"train.stages": stages})
    assert said in str(refused.value)
    assert refused.value.fix
    assert refused.value.exit_code == 2


def test_a_stage_is_typed_as_toml_in_python_and_in_a_file(tmp_path: Any) -> None:
    typed = "[{until = 0.25, rows = 16, seq_len = 8}, {until=0.5, accumulate=3}]"
    assert read_value(typed) == STAGES
    file = tmp_path / "run.toml"
    tables = "\n".join(
        "[[train.stages]]\n" + "\n".join(f"{key} = {value}" for key, value in one.items())
        for one in STAGES
    )
    file.write_text(f"[train]\nsteps = 8\nrows = 4\nseq_len = 32\n{tables}\n")
    found = [
        load("tiny", settings=SIZES | {"train.stages": STAGES}),
        load("tiny", settings=SIZES | {"train.stages": read_value(typed)}),
        load("tiny", file=file),
    ]
    assert {one.train.shapes for one in found} == {
        (Shape(16, 1, 8), Shape(4, 3, 32), Shape(4, 1, 32))
    }
    alone = load("tiny", settings=SIZES | {"train.stages": STAGES[0]})
    assert alone.train.shapes == (Shape(16, 1, 8), Shape(4, 1, 32))


# the plan


@pytest.mark.slow
@given(st.integers(1, 60), st.lists(st.floats(0.01, 0.99), min_size=1, max_size=4, unique=True))
def test_a_stage_holds_up_to_its_share_of_the_steps(steps: int, shares: list[float]) -> None:
    shares = sorted(shares)
    stages = [{"until": share, "rows": 5 + n} for n, share in enumerate(shares)]
    try:
        plan = planned(train_steps=steps, train_stages=stages)
    except ConfigError as refused:
        assert refused.what.startswith("no step falls into stage")  # noqa: PT017
        return
    for step in range(1, steps + 3):
        over = sum(share < min(step, steps) / steps for share in shares)
        assert plan.shape_at(step).rows == (5 + over if over < len(shares) else 4)
    assert sum(plan.course.values()) == steps
    total = sum(plan.shape_at(step).tokens for step in range(1, steps + 1))
    assert plan.tokens_per_step == round(total / steps)


def test_the_plan_holds_the_stages_however_rows_are_split() -> None:
    plain, plan = planned(), planned(train_stages=STAGES)
    assert "shapes" not in plain.data()["data"]
    assert plain.hash != plan.hash
    assert plan.data()["data"]["shapes"]["of"] == [[16, 8], [12, 32], [4, 32]]
    split = [STAGES[0] | {"rows": 8, "accumulate": 2}, STAGES[1] | {"accumulate": 6}]
    assert planned(train_rows=2, train_accumulate=2, train_stages=split).hash == plan.hash
    later = [STAGES[0] | {"until": 0.375}, STAGES[1]]
    assert planned(train_stages=later).hash != plan.hash
    assert plan.course == {Shape(16, 1, 8): 2, Shape(4, 3, 32): 2, Shape(4, 1, 32): 4}
    shown = str(plan)
    assert "2 steps" in shown
    assert "384 tokens = rows 4 x accumulate 3 x seq_len 32" in shown
    assert "8 steps, 1.54 k tokens" in shown
    assert json.loads(json.dumps(plan.data())) == plan.data()


def test_a_run_costs_what_its_steps_cost() -> None:
    plan = planned(train_stages=STAGES)
    whole, parts = plan.estimate(), 0
    for shape, steps in plan.course.items():
        alone = planned(**{f"train_{name}": size for name, size in shape._asdict().items()})
        parts += steps * alone.estimate().flops_per_step
    assert whole.flops_per_step * 8 == pytest.approx(parts, rel=1e-4)
    assert whole.memory == planned().estimate().memory  # 16 x 8 tokens are no more than 4 x 32
    high = planned(train_stages=[{"until": 0.5, "rows": 9}]).estimate()
    assert high.memory == planned(train_rows=9).estimate().memory


def test_a_plugin_claims_shapes_by_step_and_seed() -> None:
    plan = planned({"mine": Sized()})
    assert [plan.shape_at(step).seq_len for step in range(1, 7)] == [32, 16, 32, 16, 32, 16]
    assert planned({"mine": Sized()}, data_seed=1).shape_at(1) == Shape(8, 1, 16)
    assert plan.shape_at(9) == plan.shape_at(8)  # the dataloader is ahead
    data = json.loads(json.dumps(plan.data()))["data"]["shapes"]
    assert data["choose"] == ["mine", f"{__name__}:by_turns", [["of", 2]]]
    assert data["of"] == [[8, 16], [4, 32]]
    assert __name__ in plan.digests
    (holder,) = plan.table["data.shapes"].held
    assert (holder.owner, str(holder.value), holder.settled) == ("mine", "by_turns", True)
    assert plan.export.layout == "llama"


@pytest.mark.parametrize("answer", [2, -1, True, "short", None, 0.0])
def test_an_answer_that_is_no_index_is_refused_while_planning(answer: Any) -> None:
    with pytest.raises(PluginCodeError, match="'mine' broke the rows in wild") as refused:
        planned({"mine": Sized(wild, answer=answer)})
    assert "at step 5 is not an index of 2 shapes" in str(refused.value.where)


@pytest.mark.parametrize(
    ("plugins", "settings", "said"),
    [
        ({"mine": Sized(shapes=[(1, 33)])}, {}, "1 rows of 33 tokens"),
        ({"mine": Sized(shapes=[(0, 32)])}, {}, "0 rows of 32 tokens"),
        ({"mine": Sized(), "yours": Sized2()}, {}, "claimed by both 'mine' and 'yours'"),
        ({"mine": Sized()}, {"train_stages": STAGES}, "and train.stages does so too"),
        ({"mine": Packs()}, {"train_stages": STAGES}, "lays out rows of one length"),
        ({"mine": Packs(), "yours": Sized()}, {}, "'yours' changes it"),
        ({"mine": Ahead()}, {"train_stages": STAGES}, "12 tokens ahead, in rows of 8 tokens"),
        ({"mine": Sized()}, {"train_minutes": 1.0}, "is unknown if the run ends by the clock"),
        ({}, {"train_stages": STAGES, "train_minutes": 1.0}, "'train.stages' sizes batches"),
    ],
)
def test_what_cannot_go_with_changing_sizes_is_refused(
    plugins: dict[str, Plugin], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(PlanError) as refused:
        planned(plugins, **settings)
    assert said in refused.value.what
    assert refused.value.fix


def test_a_packer_that_says_so_is_told_any_capacity_and_rows_alone_may_always_change() -> None:
    assert len(planned({"mine": Packs(changes=True)}, train_stages=STAGES).course) == 3
    assert len(planned({"mine": Packs()}, train_stages=[{"until": 0.5, "rows": 8}]).course) == 2


def test_each_meeting_of_staged_values_and_sizes_is_compiled_once_the_largest_first() -> None:
    plan = planned({"mine": Windowed()}, train_stages=[{"until": 0.25, "seq_len": 16}])
    found = [(stage["mine.window"], shape) for stage, shape in variants_of(plan)]
    assert found == [(4, Shape(4, 1, 32)), (16, Shape(4, 1, 32)), (4, Shape(4, 1, 16))]
    assert [shape for _, shape in variants_of(planned({"mine": Windowed()}))] == [None, None]
