"""Tests of a step's counted FLOPs and bytes, against closed formulas and a computed step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.arithmetic import Arithmetic, arithmetic
from benchmarks.counting import PHASES
from minillm_core.backends.bind import bind
from minillm_core.backends.detect import Detected
from minillm_core.backends.torch.backend import TorchBackend
from minillm_core.config.load import load
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import load as load_plugins
from tools.every_plugin import Form, forms

SIZES = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "vocab": 131}
ROWS, LENGTH = 3, 32
TOKENS = ROWS * LENGTH


def planned(*plugins: str, settings: tuple[str, ...] = ()) -> Plan:
    loaded = load(
        preset="tiny",
        plugins=",".join(plugins) or None,
        assignments=[
            *(f"model.{key}={value}" for key, value in SIZES.items()),
            *(f"train.rows={ROWS}", f"train.seq_len={LENGTH}", "train.clip=0"),
            *settings,
        ],
        default_preset=lambda: ("tiny", "test"),
    )
    return build_plan(loaded.config, load_plugins(loaded.specs, loaded.config.plugins))


def newton_schulz(rows: int, cols: int, steps: int = 5) -> int:
    """Count FLOPs of x x^T, A A and (b A + c A^2) x, with r the shorter side."""
    r, c = sorted((rows, cols))
    return steps * (2 * r * r * c + 2 * r * r * r + 2 * r * r * c)


def hidden_matrices(plan: Plan) -> list[tuple[int, int]]:
    return [
        (info.shape[0], info.shape[1])
        for info in plan.parameters.values()
        if info.role.split(".")[0] in ("attention", "mlp") and len(info.shape) == 2
    ]


@pytest.mark.parametrize("settings", [(), ("model.tied=true",), ("train.accumulate=2",)])
def test_the_plain_model_is_the_closed_formula(settings: tuple[str, ...]) -> None:
    plan = planned(settings=settings)
    counted = arithmetic(plan)
    s, tokens = SIZES, plan.tokens_per_step
    width = s["dim"] // s["heads"] * s["kv_heads"]
    n = s["layers"] * (2 * s["dim"] ** 2 + 2 * s["dim"] * width + 3 * s["dim"] * s["hidden"])
    n += s["dim"] * s["vocab"]
    scores = 12 * s["layers"] * s["heads"] * (s["dim"] // s["heads"]) * LENGTH
    assert counted.all_flops == tokens * (6 * n + scores)
    assert counted.flops["backward"] == 2 * counted.flops["forward"]
    assert counted.flops["optimizer"] == 0
    assert counted.tokens == tokens


@pytest.mark.slow
def test_muon_adds_newton_schulz() -> None:
    plan, plain = planned("muon"), planned()
    counted = arithmetic(plan)
    by_hand = sum(newton_schulz(*shape) for shape in hidden_matrices(plan))
    assert by_hand > 0
    assert counted.flops["optimizer"] == by_hand
    assert arithmetic(planned("muon", settings=("muon.steps=7",))).flops["optimizer"] == sum(
        newton_schulz(*shape, steps=7) for shape in hidden_matrices(plan)
    )
    for phase in ("forward", "backward"):
        assert counted.flops[phase] == arithmetic(plain).flops[phase]


@pytest.mark.broad(2)
@pytest.mark.parametrize(
    "names",
    [
        *((), ("muon", "polar_express", "normuon"), ("qk_norm", "sparse_gate", "xsa")),
        *(("value_embeds", "relu2"), ("paired_heads",), ("mtp",), ("moe",)),
    ],
)
def test_a_step_that_is_computed_has_as_many_flops(names: tuple[str, ...]) -> None:
    plain = ("kernels=attention=composed,linear_cross_entropy=dense", "train.compile=off")
    plan = planned(*names, settings=plain)
    trainer = TorchBackend(*bind(Detected("torch", "cpu", "test"), plan), fused=False).trainer(
        plan, 0
    )
    with FlopCounterMode(display=False) as counter:
        trainer.step([batch(plan)], plan.values(0.5), TOKENS)
    assert arithmetic(plan, "float32").all_flops == counter.get_total_flops()


@pytest.mark.broad(2)
@pytest.mark.parametrize("names", [(), ("moe",), ("paired_heads",), ("sparse_gate", "smear")])
def test_the_model_is_the_plans_estimate(names: tuple[str, ...]) -> None:
    plan = planned(*names)
    counted, told = arithmetic(plan), plan.estimate("bfloat16").flops_per_step
    assert counted.flops["forward"] + counted.flops["backward"] == pytest.approx(told, rel=0.02)


def test_windows_are_counted_as_the_run_goes_through_them() -> None:
    length = 512
    settings = (f"train.seq_len={length}", "train.rows=1")
    staged = ("windows.stages=2", "windows.start=256")  # then 512: both layers are long
    whole, halves = (
        arithmetic(planned(*names, settings=(*settings, *more))).all_flops
        for names, more in (((), ()), (("windows",), staged))
    )
    keys = length - (256 + 512) / 2
    assert whole - halves == 12 * SIZES["layers"] * SIZES["dim"] * keys * length


def test_the_optimizer_moves_its_arrays() -> None:
    plan = planned()
    n = plan.num_parameters
    moved = {dtype: arithmetic(plan, dtype).least["optimizer"] for dtype in ("float32", "bfloat16")}
    assert moved["float32"] == n * (4 + 8 + 16)  # gradient, master, two moments
    assert moved["bfloat16"] == moved["float32"] + 2 * n  # plus the compute copy
    half = planned("adam8bit", settings=("adam8bit.moments=bfloat16",))
    assert arithmetic(half).least["optimizer"] == n * (4 + 8 + 8 + 2)


def test_muon_has_one_moment_and_moves_its_products() -> None:
    plan = planned("muon")
    matrices = sum(rows * cols for rows, cols in hidden_matrices(plan))
    products = 0
    for rows, cols in hidden_matrices(plan):
        r, c = sorted((rows, cols))
        products += 5 * 2 * ((2 * r * c + r * r) + 3 * r * r + (r * r + 2 * r * c))  # in bfloat16
    elements = plan.num_parameters * (4 + 8 + 2) + 16 * (plan.num_parameters - matrices)
    assert arithmetic(plan).least["optimizer"] == elements + 8 * matrices + products


def test_a_table_is_read_by_rows_and_its_gradient_is_whole() -> None:
    plan, plain = planned("bigram_hash"), planned()
    (table,) = (p.size for p in plan.parameters.values() if p.role == "embedding.bigram")
    of, beside = arithmetic(plan), arithmetic(plain)
    more = of.least["forward"] - beside.least["forward"]
    rows = TOKENS * SIZES["dim"] * 2
    assert more == pytest.approx(2 * rows, rel=0.1)  # read and written, and its ids
    assert of.least["backward"] - beside.least["backward"] == pytest.approx(
        2 * table + rows, rel=0.1
    )
    assert of.flops == beside.flops


@pytest.mark.broad(2)
@pytest.mark.parametrize("names", [(), ("muon",), ("xsa", "embed_skip"), ("moe",)])
def test_apart_is_more_than_fused(names: tuple[str, ...]) -> None:
    counted = arithmetic(planned(*names))
    assert counted.apart_bytes >= counted.least_bytes
    assert set(counted.data()["flops"]) == set(PHASES)
    assert all(counted.least[phase] <= counted.apart[phase] for phase in PHASES)


def test_what_has_no_products_costs_bytes_alone() -> None:
    plain, more = arithmetic(planned()), arithmetic(planned("embed_skip"))
    assert more.flops == plain.flops
    assert more.apart_bytes > plain.apart_bytes


def test_tokens_scale_what_is_computed_and_not_the_update() -> None:
    one, two = (arithmetic(planned(settings=(f"train.rows={rows}",))) for rows in (ROWS, 2 * ROWS))
    assert two.all_flops == 2 * one.all_flops
    assert two.least["optimizer"] == one.least["optimizer"]


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="'int8': one of float32, bfloat16, float16"):
        arithmetic(planned(), "int8")


def test_it_is_json() -> None:
    data: Any = Arithmetic({"forward": 1.4}, {"forward": 2.0}, {"forward": 3.0}, 7).data()
    assert data["flops"] == {"forward": 1}
    assert data["tokens"] == 7


def batch(plan: Plan) -> dict[str, Any]:
    shape = (ROWS, LENGTH)
    ids = torch.zeros(shape, dtype=torch.int32).numpy()
    fields = {name: ids for name in ("ids", "labels", "documents", "positions")}
    return fields | {name: ids for name, _, _ in plan.batch_fields}


@pytest.mark.slow
def test_stages_with_turns_count_as_often_as_they_have_one() -> None:
    """Shampoo's roots are computed in every fourth step here; products of the moments in each."""
    often, seldom = (
        arithmetic(planned("shampoo", settings=(f"shampoo.every={n}",))).flops["optimizer"]
        for n in (1, 4)
    )
    none = arithmetic(planned("shampoo", settings=("shampoo.every=500",))).flops["optimizer"]
    assert seldom - none == pytest.approx((often - none) / 4, rel=1e-2)
    assert often > 2 * seldom


@pytest.mark.slow
def test_batches_of_several_sizes_count_as_often_as_they_are_met() -> None:
    grown = arithmetic(planned("batch_schedule", settings=("train.steps=200",)))
    plain = arithmetic(planned(settings=("train.steps=200",)))
    plan = planned("batch_schedule", settings=("train.steps=200",))
    mean = sum(shape.tokens * n for shape, n in plan.course.items()) / 200
    assert mean < TOKENS
    assert grown.flops["forward"] == pytest.approx(plain.flops["forward"] * mean / TOKENS, rel=0.02)


@pytest.mark.nightly
@pytest.mark.parametrize("form", [form for form in forms() if form.left_out is None], ids=str)
def test_the_step_of_every_technique_can_be_counted(form: Form) -> None:
    given = [f"{key}={value}" for key, value in form.settings.items()]
    counted = arithmetic(planned(*form.names, settings=("train.steps=100", *given)))
    assert counted.all_flops > 0
    assert 0 < counted.least_bytes <= counted.apart_bytes
