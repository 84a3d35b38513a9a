"""Pipeline stages: balanced cuts, every input available, refusals by name; and training as in one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minillm_core as minillm
from minillm_core.backends.ranks import ALONE
from minillm_core.inspection import decoder, inputs_of
from minillm_core.nn.node import MASKING
from minillm_core.plan.plan import BATCH
from minillm_kit import small
from minillm_mesh import step_checks
from minillm_mesh.stages import bubble, check, cut, stages, width


@given(
    loads=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    count=st.integers(1, 8),
)
def test_the_largest_stage_is_as_small_as_it_can_be(loads: list[int], count: int) -> None:
    count = min(count, len(loads))
    bounds = cut(loads, count)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(loads), count + 1)
    assert all(first < last for first, last in pairwise(bounds))

    def most(bounds: list[int]) -> int:
        return max(sum(loads[first:last]) for first, last in pairwise(bounds))

    others = combinations(range(1, len(loads)), count - 1)
    assert most(bounds) == min(most([0, *inner, len(loads)]) for inner in others)


def plan_of(plugins: str = "", preset: str = "tiny", **settings: Any) -> minillm.Plan:
    given = {key.replace("_", ".", 1): value for key, value in settings.items()}
    named = plugins or (None if preset == "speedrun" else "")
    return minillm.build_plan(minillm.load(preset=preset, plugins=named, settings=given))


SPEEDRUN = {
    **{"preset": "speedrun", "model_layers": 6, "model_dim": 32, "model_heads": 4},
    **{"model_kv_heads": 4, "model_vocab": 128, "train_seq_len": 64, "windows_block": 8},
}


@pytest.mark.parametrize(
    ("given", "crossing", "anywhere"),
    [
        ({"model_layers": 6}, set(), set()),
        ({"plugins": "moe", "model_layers": 4}, {"layers.0.mlp.balance"}, set()),
        ({"plugins": "value_residual", "model_layers": 4}, {"value_residual_source"}, set()),
        ({"plugins": "layer_loop", "model_layers": 4}, set(), set()),
        (SPEEDRUN | {"plugins": "embed_skip"}, {"x0", "layers.0.out"}, {"value_embeds"}),
    ],
    ids=["plain", "moe", "value_residual", "layer_loop", "speedrun"],
)
def test_a_stage_has_all_that_it_reads(
    given: Mapping[str, Any], crossing: set[str], anywhere: set[str]
) -> None:
    plan = plan_of(**given)
    model: Any = decoder(plan.spec)
    values = plan.values(1.0)
    order = model.order(values)
    sources = {name for names in model.term_sources.values() for name in names}
    end = inputs_of((plan.spec.final, plan.spec.final_norm, plan.spec.loss)) | sources
    everywhere = {*plan.fields, *values, *BATCH, MASKING}
    for count in range(1, len(order) + 1):
        found = stages(plan, model, values, count)
        assert [one for stage in found for one in stage.blocks] == order
        assert {name for stage in found for name in stage.streams} == {*model.streams}
        for one, following in pairwise(found):
            assert one.sent == following.received
        for stage in found:
            there = everywhere | {*stage.received, *stage.streams}
            there |= {"x0", *model.streams} if stage.first else set()
            for layer, _ in stage.blocks:
                block = model.layers[layer]
                assert {*block.inputs} <= there
                there |= {*block.tap_names, *block.stream_names, *block.term_names}
                there |= {a for name in block.tap_names for a in model.tap_aliases.get(name, ())}
            assert {*stage.sent} <= there
            if stage.last:
                assert end <= there
        if count > 1:
            assert crossing <= {*found[0].sent}
            assert not {name for name in model.streams if name in found[0].sent} & anywhere
    whole = sum(one.flops for one in found)
    assert plan.spec.loop or whole == pytest.approx(plan.estimate().flops_per_token, rel=0.02)


def test_what_crosses_has_its_width() -> None:
    plan = plan_of("value_residual,moe", model_heads=4, model_kv_heads=2, model_dim=64)
    assert width(plan, "value_residual_source") == width(plan, "layers.0.attention.v") == 2 * 16
    assert width(plan, "layers.0.attention.y") == 4 * 16
    assert width(plan, "layers.0.mlp.balance") == 0
    assert width(plan, "x0") == width(plan, "layers.1.mid") == 64


class Score(minillm.Module):
    """A node that scores by losses."""

    def forward(self, losses: Any) -> Any:
        """Losses (B, T) -> the same."""
        return losses


class Rows(minillm.Plugin, api=1):
    """Chooses rows."""

    def compute_loss(self, loss):
        loss.rows(Score, keep=0.5)


def test_what_cannot_be_divided_is_refused() -> None:
    cases: tuple[tuple[dict[str, Any], int, str, str], ...] = (
        ({"model_layers": 3, "mesh_pipeline": 4}, 1, "4 pipeline stages", "mesh.pipeline=2,"),
        ({"model_layers": 3, "mesh_pipeline": 4}, 3, "4 pipeline stages", "mesh.pipeline=3,"),
        ({"model_layers": 12, "mesh_pipeline": 16}, 1, "there are 12", "mesh.pipeline=8,"),
        (
            {"train_accumulate": 6, "mesh_pipeline": 4},
            2,
            "1f1b needs 4 micro-batches for 4 stages, but a step has 3",
            "train.accumulate=8",
        ),
        ({"mesh_context": 2, "mesh_pipeline": 2}, 1, "share rows and be", "mesh.context=1"),
        ({"mesh_tensor": 2, "mesh_pipeline": 2}, 1, "share rows and be", "mesh.tensor=1"),
    )
    for settings, parts, why, fix in cases:
        plan = plan_of(**settings)
        with pytest.raises(minillm.ConfigError, match=why) as refused:
            check(plan, plan.config.mesh.pipeline, parts)
        assert str(refused.value.fix).startswith(fix)
    check(plan_of(train_accumulate=6, mesh_pipeline=4, mesh_schedule="gpipe"), 4, 2)
    with pytest.raises(
        minillm.PlanError, match="plugin 'rows' chooses rows by losses of the whole"
    ):
        check(small.plan(Rows()), 2, 1)
    with pytest.raises(minillm.BackendError, match="each row's layers, but there is only one"):
        ALONE.share_layers(2)
    with pytest.raises(minillm.ConfigError, match=r"4 processes .* groups of 3 ") as refused:
        step_checks.check(plan_of(mesh_pipeline=3), 4)
    assert "numbers whose product divides 4" in str(refused.value.fix)
    assert plan_of(mesh_pipeline=2).hash == plan_of().hash


def test_the_share_of_waiting_is_that_of_both_schedules() -> None:
    assert bubble(1, 4) == 0
    assert bubble(4, 4) == 3 / 7


SHORTER = "train.steps=10"
"""All phases of schedules; test_torch_ranks.py trains the same cases twice as long."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "split", "names", "how", "settings"),
    [
        (2, "micro", "moe,speedrun", "updates", ()),
        (2, "micro", "traced", "off", ()),
        (4, "rows", "windows,value_embeds", "updates", ("mesh.schedule=gpipe",)),
    ],
)
def test_stages_train_as_one_process_does(
    size: int,
    split: str,
    names: str,
    how: str,
    settings: tuple[str, ...],
    processes: Callable[..., str],
    tmp_path: Path,
) -> None:
    out = tmp_path / "found.json"
    given = split, names, f"alone,{how}", "mesh.pipeline=2", SHORTER, *settings
    processes(size, "stepped", "torch", str(out), *given)
    found: Mapping[str, Any] = json.loads(out.read_text())
    assert found.keys() == {*names.split(",")}
    for name, met in found.items():
        case = met[how]
        assert case["same"], f"{name}: the ranks have not the same weights"
        assert case["figures"] < 1e-5, f"{name}: {case['figures']} from one process"
        assert case["nats"] < 1e-6, f"{name}: evaluated apart"


@pytest.mark.slow
def test_every_plugin_is_computed_in_stages(processes: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    processes(2, "shared", str(out), "pipeline")
    found: Mapping[str, float | str] = json.loads(out.read_text())
    assert not {name: why for name, why in found.items() if isinstance(why, str)}
    assert len(found) > 20
    for name, far in found.items():
        assert float(far) < 1e-5, f"{name}: {far} from one process"
