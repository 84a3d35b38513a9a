"""Tests of the design of an ablation: comparisons, runs, their reuse, and the reported results."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest

from minillm_core import build_plan, load
from minillm_core.errors import Interrupted, MinillmError, PluginCodeError, Refusal, Stopped
from minillm_core.plugins.manager import load as load_plugins
from minillm_core.studies import replace_file
from minillm_lab.ablation import Ablation, points
from minillm_lab.ablation_page import at_equal_tokens
from minillm_lab.members import BOUND
from minillm_lab.result_diff import settings
from minillm_lab.variants import leave_one_out, one_at_a_time, variant

ABOUT = {"data": "text", "device": "a CPU", "dtype": "float32", "versions": {"minillm-core": "1"}}


@pytest.fixture
def ablation(tmp_path: Path, asked: Any) -> Any:
    def make(rig: Any, judged: tuple[str, ...], **more: Any) -> Ablation:
        settings = more.pop("settings", ())
        named = (*judged, *more.pop("company", ()))
        loaded, plugins = asked(*named, steps=more.get("steps") or 100, settings=settings)
        design = more.pop("design", one_at_a_time)(loaded, plugins, judged)
        given = {"steps": 100, "minutes": None, "about": ABOUT, "say": lambda text: None, **more}
        return Ablation(tmp_path, design, range(3), rig, **given)

    return make


def test_each_alone_against_none(ablation: Any, rigged: Any) -> None:
    rig = rigged({"rule": 0.2, "scale": -0.1})
    found = ablation(rig, ("scale", "rule")).run()
    assert list(found["plugins"]) == ["scale", "rule"]
    made = [names for names, _, _ in rig.made]
    assert made == [()] * 3 + [("scale",)] * 3 + [("rule",)] * 3  # a variant's seeds consecutively
    turns = rigged({})
    for seeds in (4, 9):  # stopped, and resumed
        turns.stop_after, told = seeds, list[int]()
        again = ablation(
            *(turns, ("scale", "rule")),
            turns=True,
            steps=50,
            watch=lambda run, progress, told=told: told.append(run.number),
        )
        if seeds == 4:
            with pytest.raises(Stopped):
                again.run()
        else:
            again.run()
    assert told == [5, 6, 7, 8, 9]
    none, scale, ruled = (), ("scale",), ("rule",)
    assert [(names, seed) for names, seed, _ in turns.made] == [
        *((none, 0), (scale, 0), (ruled, 0)),
        *((ruled, 1), (scale, 1), (none, 1)),
        *((none, 2), (scale, 2), (ruled, 2)),
    ]
    rule = found["plugins"]["rule"]
    assert rule["effect"] == pytest.approx(-0.201, abs=1e-3)
    assert rule["low"] < rule["effect"] < rule["high"] < 0
    assert rule["distinguishable"]
    assert found["plugins"]["scale"]["effect"] == pytest.approx(0.1, abs=2e-3)
    assert rule["speed"]["effect"] == pytest.approx(1.0)
    assert found["finished"]


def test_the_first_is_run_again_for_the_time_of_a_slower_one(ablation: Any, rigged: Any) -> None:
    rig = rigged({"rule": 0.2}, {"rule": 1.5})
    found = ablation(rig, ("rule",)).run()
    assert [steps for names, _, steps in rig.made if names] == [100] * 3
    assert [steps for names, _, steps in rig.made if not names] == [100] * 3 + [150] * 3
    rule = found["plugins"]["rule"]
    assert rule["equal_seconds"]["effect"] == pytest.approx(rule["effect"] + 0.01 * 50)
    assert rule["equal_seconds"]["between"] == [150, 150]  # measured, not interpolated between two
    assert rule["speed"]["effect"] == pytest.approx(1 / 1.5)
    assert found["variants"]["+rule"]["steps_at_equal_seconds"] == 150


def test_without_equal_seconds_nothing_is_run_again_and_the_page_says_so(
    ablation: Any, rigged: Any, tmp_path: Path
) -> None:
    rig = rigged({"rule": 0.2, "scale": 0.1}, {"rule": 1.5})  # scale is as fast as the baseline
    found = ablation(rig, ("rule", "scale"), equal_seconds=False).run()
    assert [steps for _, _, steps in rig.made] == [100] * 9
    assert [one["equal_seconds"] for one in found["plugins"].values()] == [None, None]
    page = (tmp_path / "ablation.html").read_text(encoding="utf-8")
    assert "not measured: --no-equal-seconds" in page
    assert "the baseline is also trained" not in page
    said: list[str] = []
    whole = ablation(rig, ("rule", "scale"), say=said.append).run()
    assert "at equal seconds: 3 more runs of baseline, of 150 steps" in said
    assert all(one["equal_seconds"] for one in whole["plugins"].values())
    again = ablation(rig, ("rule", "scale"), equal_seconds=False)
    (said_first,) = again.replaced()
    assert "will be without effects at equal seconds: the runs stay" in said_first
    assert again.run()["plugins"] == found["plugins"]
    assert len(rig.made) == 12


def test_smaller_steps_are_more_steps_with_as_many_tokens(ablation: Any, rigged: Any) -> None:
    said: list[str] = []
    rig = rigged({"small": 0.2}, {"small": 0.75})
    found = ablation(rig, ("small",), say=said.append).run()
    assert [steps for names, _, steps in rig.made if names] == [133] * 3
    assert "+small: 133 steps, which have as many tokens as 100 of baseline" in said
    equal = at_equal_tokens(found)
    assert [run["variant"] for run in equal] == ["baseline"] * 3 + ["+small"] * 3
    tokens = {run["variant"]: run["tokens"] for run in equal}
    assert tokens["+small"] == pytest.approx(tokens["baseline"], rel=0.005)
    assert found["plugins"]["small"]["pairs"] == 3
    again = ablation(rigged({}), ("small",))
    assert again.run()["plugins"] == found["plugins"]
    assert not again.study.made


def test_a_loss_is_read_between_lengths_that_lie_close(ablation: Any, rigged: Any) -> None:
    rig = rigged({}, {"rule": 1.2, "scale": 1.1})
    found = ablation(rig, ("rule", "scale")).run()["plugins"]
    assert {steps for names, _, steps in rig.made} == {100, 120}
    assert found["rule"]["equal_seconds"]["between"] == [120, 120]
    told = found["scale"]["equal_seconds"]
    assert (told["steps"], told["between"], told["pairs"]) == (110, [100, 120], 3)
    # The fake study's loss is linear in the steps, 0.01 each; interpolation in their logarithm is slightly off.
    assert told["effect"] == pytest.approx(found["scale"]["effect"] + 0.01 * 10, abs=6e-3)


def test_left_out_ones_are_held_against_all_in_their_own_time(ablation: Any, rigged: Any) -> None:
    rig = rigged({"rule": 0.2, "scale": 0.1}, {"scale": 1.25})
    found = ablation(rig, ("rule", "scale"), design=leave_one_out).run()["plugins"]
    assert {steps for names, _, steps in rig.made if len(names) == 2} == {80, 100}
    scale = found["scale"]
    assert scale["equal_seconds"]["effect"] == pytest.approx(scale["effect"] + 0.01 * 20)
    assert found["rule"]["equal_seconds"]["effect"] == found["rule"]["effect"]


def test_nothing_is_said_of_equal_seconds_before_it_was_measured(
    ablation: Any, rigged: Any, tmp_path: Path
) -> None:
    rig = rigged({"rule": 0.2}, {"rule": 1.5})
    rig.stop_after = 6
    with pytest.raises(Stopped):
        ablation(rig, ("rule",)).run()
    found = json.loads((tmp_path / "ablation.json").read_bytes())
    assert found["plugins"]["rule"]["pairs"] == 3
    assert found["plugins"]["rule"]["equal_seconds"] is None
    assert "not run yet" in (tmp_path / "ablation.html").read_text(encoding="utf-8")


def test_an_error_that_ends_it_is_on_the_page_until_it_goes_on(
    ablation: Any, rigged: Any, tmp_path: Path
) -> None:
    rig = rigged({"rule": 0.2})
    rig.breaks = ("rule", 1)
    with pytest.raises(PluginCodeError):
        ablation(rig, ("rule",)).run()
    said = "ended by an error: plugin &#x27;rule&#x27; raised in on_batch (rule.py:3)"
    assert said in (page := tmp_path / "ablation.html").read_text(encoding="utf-8")
    ablation(rigged({"rule": 0.2}), ("rule",)).run()
    assert "ended by an error" not in page.read_text(encoding="utf-8")


def test_variants_may_be_made_apart(ablation: Any, rigged: Any) -> None:
    whole = ablation(rigged({"rule": 0.2}, {"rule": 1.5}), ("rule",))
    first, second = (
        ablation(rigged({"rule": 0.2}, {"rule": 1.5}), ("rule",)) for _ in range(2)
    )  # as with two processes
    second.make(second.design.variants[1])
    first.make(first.reference)
    assert first.train_reference()["plugins"]["rule"]["equal_seconds"]["between"] == [150, 150]
    assert whole.run()["plugins"] == first.train_reference()["plugins"]
    assert not whole.study.made


def test_one_as_fast_serves_both(ablation: Any, rigged: Any) -> None:
    rig = rigged({"rule": 0.2}, {"rule": 1.005})
    rule = ablation(rig, ("rule",)).run()["plugins"]["rule"]
    assert len(rig.made) == 6
    assert rule["equal_seconds"]["effect"] == rule["effect"]


def test_all_against_all_but_one_and_what_builds_on_it(ablation: Any, rigged: Any) -> None:
    rig = rigged({"rule": 0.2, "extension": 0.05, "scale": 0.0})
    judged = ("rule", "extension", "scale")
    found = ablation(rig, judged, design=leave_one_out).run()
    assert list(found["plugins"]) == ["rule", "extension", "scale"]
    rule, scale = found["plugins"]["rule"], found["plugins"]["scale"]
    assert rule["pooled"]
    assert scale["high"] - scale["low"] < rule["high"] - rule["low"]  # sets far away do not count
    assert (rule["without"], rule["together"]) == ("-rule-extension", ["extension"])
    assert rule["effect"] == pytest.approx(-0.251, abs=1e-3)
    assert "together" not in found["plugins"]["extension"]
    assert found["plugins"]["extension"]["effect"] == pytest.approx(-0.051, abs=1e-3)
    assert {names for names, _, _ in rig.made} == {
        ("extension", "rule", "scale"),
        ("scale",),
        ("rule", "scale"),
        ("extension", "rule"),
    }


def test_one_that_builds_on_another_is_refused_alone_and_judged_in_company(
    ablation: Any, rigged: Any
) -> None:
    with pytest.raises(Refusal, match="'extension' cannot be judged alone") as refused:
        ablation(rigged({}), ("extension",))
    assert "--with" in str(refused.value)
    rig = rigged({"extension": 0.05})
    found = ablation(rig, ("extension",), company=("rule",)).run()
    assert found["variants"]["baseline"]["plugins"] == ["rule"]
    assert found["plugins"]["extension"]["effect"] < 0


def test_what_too_many_build_on_is_not_left_out(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm_lab.variants.MOST_TOGETHER", 0)
    loaded, plugins = asked("rule", "extension")
    design = leave_one_out(loaded, plugins, ("rule", "extension"))
    assert [one.plugin for one in design.comparisons] == ["extension"]
    assert "no active plugin provides" in design.unplanned["rule"]
    with pytest.raises(Refusal, match="none of the plugins can be left out"):
        leave_one_out(loaded, plugins, ("rule",))


def test_who_watches_is_told_what_is_ahead(ablation: Any, rigged: Any) -> None:
    told: list[Any] = []

    def watch(going: Any, progress: float) -> None:
        told.append((going.number, going.runs, len(going.ahead), going.compiling))

    rig = rigged({"rule": 0.2}, {"rule": 1.25})
    rig.stop_after = 2
    with pytest.raises(Stopped):
        ablation(rig, ("rule",), watch=watch).run()
    again = rigged({"rule": 0.2}, {"rule": 1.25})
    ablation(again, ("rule",), watch=watch).run()
    assert told == [
        *[(1, 6, 5, 1), (1, 6, 5, 0), (2, 6, 4, 0)],
        *[(3, 6, 3, 1), (3, 6, 3, 0)],  # resumed
        *[(4, 6, 2, 1), (4, 6, 2, 0), (5, 6, 1, 0), (6, 6, 0, 0)],
        # at equal seconds, once the speeds are known
        *[(7, 9, 2, 1), (7, 9, 2, 0), (8, 9, 1, 0), (9, 9, 0, 0)],
    ]


def test_finished_runs_are_not_made_again(ablation: Any, rigged: Any, tmp_path: Path) -> None:
    rig = rigged({"rule": 0.2})
    rig.stop_after = 2
    with pytest.raises(Stopped, match="2 finished runs kept") as stopped:
        ablation(rig, ("rule",)).run()
    assert stopped.value.fix == f"the same command with --out {tmp_path} continues"
    assert not json.loads((tmp_path / "ablation.json").read_bytes())["finished"]
    assert "Not finished: based on 2 runs" in (tmp_path / "ablation.html").read_text(
        encoding="utf-8"
    )
    again, lines = rigged({"rule": 0.2}), list[str]()
    found = ablation(again, ("rule",), say=lines.append).run()
    assert lines == [f"2 finished runs of {tmp_path / 'runs'} are used again"]
    assert [(names, seed) for names, seed, _ in again.made] == [
        ((), 2),
        *[(("rule",), seed) for seed in range(3)],
    ]
    whole = rigged({"rule": 0.2})
    assert found["plugins"] == ablation(whole, ("rule",)).run()["plugins"]
    assert not whole.made


def test_what_a_result_replaces_is_said(ablation: Any, rigged: Any, tmp_path: Path) -> None:
    lines: list[str] = []
    names = ("rule", "scale")
    first = ablation(rigged({}), names, say=lines.append)
    first.run()
    assert not any("used again" in line for line in lines)
    assert [*ablation(rigged({}), names).replaced()] == []
    other = ablation(rigged({}), ("rule",), company=("scale",), design=leave_one_out)
    other.seeds = (0, 1)
    design, gone, seeds = other.replaced()
    path = tmp_path / "ablation.json"
    assert design == (
        f"{path} has the result of --one-at-a-time, which is replaced now. Its runs are kept; repeating "
        "the earlier command writes that result again"
    )
    assert gone.startswith(f"{path} will be without scale")
    assert seeds == (
        f"{path} will be without seed 2: the runs stay, and --seeds 3 has the result of all"
    )
    other.seeds = (1, 2, 3)
    assert [*other.replaced()][-1].endswith("will be without seed 0: the runs stay")


@pytest.mark.parametrize(
    "content",
    ['{"design": ', '{"plugins": 3}', '{"variants": {"+rule": []}}', '{"seeds": ["0", 1]}'],
)
def test_a_damaged_result_is_named_and_written_anew(
    ablation: Any, rigged: Any, tmp_path: Path, content: str
) -> None:
    whole = ablation(rigged({}), ("rule",), steps=None, minutes=0.1).run()
    path, again = tmp_path / "ablation.json", rigged({})
    path.write_text(content)
    opened = ablation(again, ("rule",), steps=None, minutes=0.1)
    (line,) = opened.replaced()
    assert line.startswith(f"warning: {path} is not as minillm writes it, and is written anew")
    assert opened.run() == whole
    assert not again.made


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("identity", None, "TypeError: "),
        ("run", {}, "seed: Field required"),
        ("wall_seconds", [], "TypeError: "),
        (("run", "curve"), [], "its curve is empty"),
        (("run", "seconds"), "x", "seconds: Input should be a valid number"),
        (("run", "tokens_per_second"), 0, "tokens_per_second: Input should be greater than 0"),
    ],
)
def test_a_damaged_run_is_named(
    ablation: Any, rigged: Any, tmp_path: Path, part: Any, value: Any, said: str
) -> None:
    ablation(rigged({}), ("rule",)).run()
    path = tmp_path / "runs" / "with-rule-seed1-100.json"
    document = table = json.loads(path.read_text())
    *above, last = (part,) if isinstance(part, str) else part
    for name in above:
        table = table[name]
    table[last] = value
    path.write_text(json.dumps(document))
    with pytest.raises(Refusal, match=f"{path.name} is not as minillm writes it") as refused:
        ablation(rigged({}), ("rule",)).run()
    assert f"{path}: " in str(refused.value.where)
    assert said in str(refused.value.where)
    assert refused.value.fix == "remove this file: its run is trained again"


def test_a_signal_before_the_first_run_leaves_nothing(ablation: Any, rigged: Any) -> None:
    rig = rigged({})
    rig.stop_after = 0
    with pytest.raises(Interrupted, match="no run was finished") as stopped:
        ablation(rig, ("rule",)).run()
    assert stopped.value.fix == "the same command starts again"


@pytest.mark.parametrize("change", ["data", "device", "dtype", "versions"])
def test_runs_of_another_ablation_are_refused(ablation: Any, rigged: Any, change: str) -> None:
    ablation(rigged({}), ("rule",)).run()
    other = {"minillm-core": "another"} if change == "versions" else "another"
    changed = ablation(rigged({}), ("rule",), about={**ABOUT, change: other})
    with pytest.raises(Refusal, match="the runs of another ablation") as refused:
        changed.run()
    assert change in str(refused.value)


@pytest.mark.parametrize(
    "setting",
    ["train.compile=off", "train.checkpointing=true", 'kernels="reference"', "eval.tokens=1024"],
)
def test_so_are_those_with_another_speed_or_evaluation_and_the_same_plan(
    ablation: Any, rigged: Any, tmp_path: Path, setting: str
) -> None:
    found = ablation(rigged({}), ("rule",)).run()
    other = ablation(rigged({}), ("rule",), settings=(setting,))
    hashes = [one["plan_hash"] for one in found["variants"].values()]
    assert [one.plan.hash for one in other.design.variants] == hashes
    name = setting.partition("=")[0].removeprefix("train.")
    with pytest.raises(Refusal, match=f"its {name} is (auto|False|65536), this one's"):
        other.run()


def test_a_run_that_names_no_kernels_had_the_usual_ones_and_the_evaluation_of_the_result(
    ablation: Any, rigged: Any, tmp_path: Path
) -> None:
    about = {**ABOUT, "eval_tokens": 65_536}
    ablation(rigged({}), ("rule",), about=about).run()
    for path in (tmp_path / "runs").iterdir():
        kept = json.loads(path.read_bytes())
        later = {*BOUND, "eval_tokens"}
        kept["identity"] = {k: v for k, v in kept["identity"].items() if k not in later}
        path.write_text(json.dumps(kept))
    copy = "baseline-seed0-100 copy.json", "baseline-seed0-x.json", "baseline-seed0-0100.json"
    for name in copy:  # not as runs are called
        (tmp_path / "runs" / name).write_text("{}")
    ablation(again := rigged({}), ("rule",), about=about).run()
    assert not again.made
    more = {"settings": ("eval.tokens=1024",), "about": {**ABOUT, "eval_tokens": 1024}}
    with pytest.raises(Refusal, match=r"its eval\.tokens is 65536, this one's 1024"):
        ablation(again, ("rule",), **more).run()


@pytest.mark.parametrize("full", ["runs/", "ablation.json", "ablation.html"])
def test_a_full_disk_is_named_and_a_page_that_cannot_be_written_is_none_to_wait_for(
    ablation: Any, rigged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    lines, written = list[str](), replace_file

    def replaced(path: Path, data: bytes) -> None:
        if full in str(path.relative_to(tmp_path)):
            raise OSError(errno.ENOSPC, "No space left on device")
        written(path, data)

    monkeypatch.setattr("minillm_lab.members.replace_file", replaced)
    one = ablation(rigged({}), ("rule",), say=lines.append)
    if full == "ablation.html":
        assert one.run()["finished"]
        said = "warning: ablation.html could not be written: No space left on device"
        assert len([line for line in lines if line.startswith(said)]) == 1
        return
    with pytest.raises(
        MinillmError, match="could not be written: No space left on device"
    ) as found:
        one.run()
    assert full in str(found.value.where)
    again = f"the same command with --out {tmp_path} continues"
    assert found.value.fix == f"make room, or make the folder writable; {again}"
    monkeypatch.undo()
    rig = rigged({})
    ablation(rig, ("rule",)).run()
    assert len(rig.made) == (5 if full == "ablation.json" else 6)


def test_a_run_that_was_cut_short_is_made_again(ablation: Any, rigged: Any, tmp_path: Path) -> None:
    ablation(rigged({}), ("rule",)).run()
    torn = tmp_path / "runs" / "with-rule-seed1-100.json"
    torn.write_bytes(torn.read_bytes()[:40])
    rig, told = rigged({}), []
    ablation(rig, ("rule",), say=told.append).run()
    assert rig.made == [(("rule",), 1, 100)]
    assert told.count(f"warning: {torn} cannot be read: its run is trained again") == 1


def test_a_pair_that_diverged_is_told_and_left_out(ablation: Any, rigged: Any) -> None:
    rig, told = rigged({"rule": 0.2}), []
    rig.diverges = {("rule", 1)}
    found = ablation(rig, ("rule",), say=told.append).run()
    assert found["plugins"]["rule"]["pairs"] == 2
    assert found["plugins"]["rule"]["failed"] == 1
    assert any("not finite" in line for line in told)
    rig.diverges = {("rule", seed) for seed in range(3)}
    all_failed = ablation(rig, ("rule",), about={**ABOUT}, steps=50).run()["plugins"]["rule"]
    assert (all_failed["effect"], all_failed["failed"]) == (None, 3)


def test_minutes_become_steps_once(ablation: Any, rigged: Any) -> None:
    found = ablation(rigged({}), ("rule",), steps=None, minutes=0.1).run()
    assert found["steps"] == 60  # 6 seconds of 0.1 each
    slower = rigged({})
    slower.step_seconds = lambda *_: 0.5  # the speed of another day
    assert ablation(slower, ("rule",), steps=None, minutes=0.1).run()["steps"] == 60
    assert not slower.made
    other = ablation(slower, ("rule",), steps=None, minutes=0.1, design=leave_one_out)
    assert other.run()["steps"] == 12  # those of another first set are measured
    assert ablation(slower, ("rule",), steps=None, minutes=0.2).run()["steps"] == 24


def test_the_entry_that_differs_is_named(ablation: Any, rigged: Any) -> None:
    ablation(rigged({}), ("rule",)).run()
    newer = {**ABOUT, "versions": {"minillm-core": "1", "torch": "2"}}
    with pytest.raises(Refusal) as refused:
        ablation(rigged({}), ("rule",), about=newer).run()
    assert "versions: its torch is None, this one's 2" in str(refused.value.where)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.rows=3", "its train.rows is 8, this one's 3"),
        ("model.layers=1", "its model.layers is 4, this one's 1"),
        ("train.betas=[0.5, 0.75]", "its train.betas is 0.9, 0.95, this one's 0.5, 0.75"),
        ("data.seed=7", r"its plan is \w{12}, this one's \w{12}, by code or by a setting"),
    ],
)
def test_of_two_plans_the_setting_that_differs_is_named(
    ablation: Any, rigged: Any, setting: str, said: str
) -> None:
    first, other = (ablation(rigged({}), ("rule",), settings=more) for more in ((), (setting,)))
    for one in (first, other):
        config = one.design.variants[0].plan.config
        tables = {"model": config.model, "train": config.train}
        one.about |= {name: table.model_dump(mode="json") for name, table in tables.items()}
    first.run()
    with pytest.raises(Refusal) as refused:
        other.run()
    assert re.search(said, str(refused.value.where))


def test_so_are_plugins_and_their_options() -> None:
    def run(name: str, options: dict[str, Any], *plugins: str) -> dict[str, Any]:
        return {"variants": {name: {"options": options, "plugins": list(plugins)}}}

    was = run("+rule", {"rule": {"lr": 0.1, "for": ["*"]}}, "rule")
    assert settings(was, run("+rule", {"rule": {"lr": 0.2, "for": ("*",)}}, "rule"), "+rule") == (
        "its rule.lr is 0.1, this one's 0.2"
    )
    assert settings(was, run("+rule", {}, "rule", "scale"), "+rule") == (
        "its set of plugins is rule, this one's rule, scale"
    )
    assert settings(was, was, "+rule") is None
    for torn in ({}, {"variants": 3}, {"variants": {"+rule": []}, "model": "x"}):
        assert settings(torn, was, "+rule") is None
    many = {"train": {name: 0 for name in "abcde"}}
    told = settings(many, {"train": {name: 1 for name in "abcde"}}, "+rule")
    assert told is not None
    assert told.endswith("its train.c is 0, this one's 1; and 2 more")


@pytest.mark.parametrize(
    ("steps", "tokens", "expected"), [(10, 65_536, 2), (360, 65_536, 8), (100_000, 65_536, 10)]
)
def test_validation_takes_no_more_than_a_quarter_of_the_time(
    asked: Any, steps: int, tokens: int, expected: int
) -> None:
    loaded, plugins = asked("rule")
    plan = one_at_a_time(loaded, plugins, ("rule",)).variants[0].plan
    assert plan.config.eval.tokens == tokens
    assert points(plan.with_train(steps=steps)) == expected


def test_a_plan_with_some_plugins_has_no_options_of_the_others() -> None:
    pytest.importorskip("minillm_muon")
    loaded = load("tiny", plugins="muon,zero_init", settings={"muon.momentum": 0.9})
    plugins = load_plugins(loaded.specs, loaded.config.plugins)
    plan = variant("+zero_init", loaded, plugins, ["zero_init"]).plan
    assert [one.name for one in plan.active] == [one.name for one in plan.plugins] == ["zero_init"]
    assert not plan.config.plugins.get("muon")
    assert plan.hash == build_plan(load("tiny", plugins="zero_init")).hash
