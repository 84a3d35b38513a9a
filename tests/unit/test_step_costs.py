"""Tests of step times from ablations with their arithmetic, and of the page that shows them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.arithmetic import Arithmetic, arithmetic
from benchmarks.costs_page import PAGE, costs, tables
from benchmarks.environment import RESULTS
from benchmarks.step_costs import BANDWIDTH, collected, planned, predicted
from minillm_core.backends.torch.backend import PEAK_FLOPS
from minillm_core.config.load import load
from minillm_core.plan import build_plan
from minillm_core.plugins.manager import load as load_plugins

SECONDS = {"baseline": 0.1, "+relu2": 0.11, "+moe": 0.15}
SIZES = ("model.layers=2", "model.dim=64", "model.hidden=96", "model.vocab=131", "train.rows=2")


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """Build an ablation.json of muon's company, with relu2 and moe; two pairs."""
    sets = {"baseline": ["muon"], "+relu2": ["muon", "relu2"], "+moe": ["moe", "muon"]}
    variants, config = {}, None
    for name, plugins in sets.items():
        loaded = load(
            preset="tiny",
            plugins=",".join(plugins),
            assignments=SIZES,
            default_preset=lambda: ("tiny", "test"),
        )
        config = loaded.config
        plan = build_plan(config, load_plugins(loaded.specs, config.plugins))
        variants[name] = {
            "plugins": plugins,
            "options": {one.name: one.options for one in plan.plugins},
            "parameters": plan.num_parameters,
        }
    assert config is not None
    return {
        "plugins": {
            name[1:]: {
                **{"with": name, "without": "baseline", "effect": -0.1, "pairs": 2},
                "speed": {"effect": s, "low": s * 0.98, "high": s * 1.02},
            }
            for name in ("+relu2", "+moe")
            for s in [SECONDS["baseline"] / SECONDS[name]]
        },
        "not_judged": {},
        "variants": variants,
        "steps": 10,
        "seeds": [0, 1],
        "runs": [
            {
                **{"variant": name, "seed": seed, "steps": 10, "tokens": 5120},
                "seconds": 10 * SECONDS[name] + seed / 100,
            }
            for name in sets
            for seed in (0, 1)
        ],
        "finished": True,
        "preset": "tiny",
        "model": config.model.model_dump(mode="json"),
        "train": config.train.model_dump(mode="json"),
        **{"device": "NVIDIA H100 80GB HBM3", "dtype": "bfloat16", "backend": "torch"},
        **{"hardware": {}, "versions": {"python": "3.12", "torch": "2.11"}},
        **{"date": "2026-01-31", "commit": None},
    }


@pytest.fixture(scope="module")
def figures(result: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(collected([result], "0123abcd")))


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the arithmetic by constants, where it is irrelevant."""
    same = Arithmetic({"forward": 2.0}, {"forward": 3.0}, {"forward": 4.0}, 1)
    monkeypatch.setattr("benchmarks.step_costs.arithmetic", lambda plan, dtype: same)


def test_a_plan_is_the_measured_one(result: dict[str, Any]) -> None:
    for name, variant in result["variants"].items():
        plan = planned(result, name)
        assert plan.num_parameters == variant["parameters"]
        assert sorted(one.name for one in plan.plugins) == sorted(variant["plugins"])


def test_another_plan_is_refused(result: dict[str, Any]) -> None:
    other = result | {"model": result["model"] | {"vocab": 97}}
    with pytest.raises(SystemExit, match="count with the same commit"):
        planned(other, "baseline")


@pytest.mark.slow
def test_step_times_are_those_of_the_pairs(figures: dict[str, Any]) -> None:
    moe, relu2 = figures["techniques"]  # the most expensive first
    assert (moe["technique"], relu2["technique"]) == ("moe", "relu2")
    assert moe["step_time"]["ratio"] == pytest.approx(1.5)
    assert moe["step_time"]["low"] == pytest.approx(1.5 / 1.02)
    assert moe["step_time"]["high"] == pytest.approx(1.5 / 0.98)
    assert moe["with"]["step_seconds"] == pytest.approx(0.1505)
    assert relu2["company"] == moe["company"] == ["muon"]
    assert moe["options"]["capacity"] > 0
    assert figures["measured"][0]["commit"] == "0123abcd"


def test_the_arithmetic_is_that_of_both_plans(
    result: dict[str, Any], figures: dict[str, Any]
) -> None:
    row = figures["techniques"][0]
    having, without = (arithmetic(planned(result, name)) for name in ("+moe", "baseline"))
    assert row["flops_ratio"] == having.all_flops / without.all_flops
    assert row["bytes_ratio"]["fused"] == having.least_bytes / without.least_bytes
    assert row["with"]["flops"] == having.data()["flops"]
    at = [predicted(one, result["device"]) for one in (having, without)]
    assert at[0]
    assert at[1]
    assert row["predicted_ratio"]["fused"] == at[0][0] / at[1][0]


def test_predictions_are_the_datasheets() -> None:
    counted = Arithmetic({"forward": 989.4e12}, {"forward": 3.35e12}, {"forward": 6.7e12}, 1)
    assert predicted(counted, "NVIDIA H100 80GB HBM3") == pytest.approx((2.0, 3.0))
    assert predicted(counted, "NVIDIA H100 PCIe") == pytest.approx(
        (989.4 / 756 + 3.35 / 2, 989.4 / 756 + 6.7 / 2)
    )
    assert predicted(counted, "a processor") is None
    assert set(BANDWIDTH) <= set(PEAK_FLOPS)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"effect": None}, "no pair"),
        ({"speed": {"effect": 1.0, "low": None, "high": None}}, "no interval"),
    ],
)
@pytest.mark.usefixtures("uncounted")
def test_what_has_no_interval_is_left_out(
    result: dict[str, Any], change: dict[str, Any], why: str
) -> None:
    plugins = result["plugins"] | {"moe": result["plugins"]["moe"] | change}
    found = collected([result | {"plugins": plugins, "not_judged": {"xsa": "it needs more"}}])
    assert [row["technique"] for row in found["techniques"]] == ["relu2"]
    assert why in found["left_out"]["moe"]
    assert found["left_out"]["xsa"] == "it needs more"


@pytest.mark.usefixtures("uncounted")
def test_runs_of_other_tokens_are_left_out(result: dict[str, Any]) -> None:
    runs = [run | {"tokens": 4096} if run["variant"] == "+moe" else run for run in result["runs"]]
    found = collected([result | {"runs": runs}])
    assert [row["technique"] for row in found["techniques"]] == ["relu2"]
    assert found["left_out"] == {"moe": "its runs had other numbers of tokens"}


@pytest.mark.usefixtures("uncounted")
def test_an_unfinished_result_gives_the_techniques_with_all_pairs(result: dict[str, Any]) -> None:
    plugins = result["plugins"] | {"moe": result["plugins"]["moe"] | {"pairs": 1}}
    unfinished = result | {"plugins": plugins, "finished": False}
    found = collected([unfinished])
    assert [row["technique"] for row in found["techniques"]] == ["relu2"]
    assert found["left_out"] == {"moe": "it has 1 of 2 pairs"}
    alone = result | {"plugins": {"moe": result["plugins"]["moe"]}}
    assert collected([unfinished, alone])["left_out"] == {}, "measured elsewhere"
    found = collected([result], untimed=["moe"])
    assert found["left_out"] == {"moe": "other work ran beside its runs"}


@pytest.mark.usefixtures("uncounted")
def test_the_last_of_several_measurements_counts(result: dict[str, Any]) -> None:
    slower = [
        run | {"seconds": 2 * run["seconds"]} if run["variant"] == "+moe" else run
        for run in result["runs"]
    ]
    again = result | {"plugins": {"moe": result["plugins"]["moe"]}, "runs": slower}
    moe, relu2 = collected([result, again])["techniques"]
    assert (moe["technique"], moe["measured"]) == ("moe", 1)
    assert (relu2["technique"], relu2["measured"]) == ("relu2", 0)
    assert moe["with"]["step_seconds"] == pytest.approx(0.301)
    assert collected([result, again])["replaced"] == [{"technique": "moe", "measured": 0}]


# The page


def test_the_page_shows_the_results() -> None:
    assert PAGE.generated() == PAGE.text(), "python -m benchmarks.costs_page --write"


def test_a_dear_technique_without_a_reason_is_refused(figures: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match=r"moe: more than 1\.3 x"):
        list(costs(figures, {}))


def test_the_reason_stands_in_the_row(figures: dict[str, Any], tmp_path: Path) -> None:
    shutil.copy(RESULTS / "planning.json", tmp_path)
    assert "No step times have been measured yet." in tables(tmp_path, {})
    (tmp_path / "step_costs.json").write_text(json.dumps({"figures": figures}))
    shown = tables(tmp_path, {"moe": "tokens are sorted", "relu2": "never shown"})
    (moe,) = (line for line in shown.splitlines() if line.startswith("| `moe`"))
    assert moe.startswith("| `moe` | 1.500 | 1.471 to 1.531 |")
    assert moe.endswith(" tokens are sorted |")
    assert "never shown" not in shown
    assert "Beside `muon`:" in shown
    assert "The baseline's step: 100.5 ms (" in shown
    assert (
        "- Measured with 2 seeds of 10 steps: 64 wide, 2 layers, 131 tokens, 2 x 256 a step"
        in shown
    )
    assert "torch 2.11; 2026-01-31, commit 0123abc" in shown


@pytest.mark.usefixtures("uncounted")
def test_an_unknown_device_predicts_nothing(result: dict[str, Any]) -> None:
    found = collected([result | {"device": "a processor"}])
    assert all(row["predicted_ratio"] is None for row in found["techniques"])
    assert all(math.isfinite(row["flops_ratio"]) for row in found["techniques"])
    assert "|  |" in "\n".join(costs(found, {"moe": "sorted"}))
