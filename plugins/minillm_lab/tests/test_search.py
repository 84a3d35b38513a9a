"""Tests of a search: its candidates, its decisions, and equality of a killed and an uninterrupted search."""

from __future__ import annotations

import errno
import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minillm_core import Interrupted, MinillmError, NonFinite, Plan, Refusal, build_plan
from minillm_core.cli.main import main
from minillm_core.inspection import find_plugin, installed_plugins, with_options
from minillm_core.plugins.discover import PluginEntry
from minillm_core.studies import RunRequest, StopRequest, replace_file
from minillm_lab.cli.search import show_search
from minillm_lab.confirm import FRESH, Confirmation
from minillm_lab.members import Members
from minillm_lab.paired_runs import Length, PairedRuns
from minillm_lab.pool import Made
from minillm_lab.resumed import begun_with
from minillm_lab.search import Job, Request, seconds_of
from minillm_lab.search_page import headline, markdown, search_page
from minillm_lab.space import (
    Prospect,
    Recipe,
    Space,
    installed,
    prospects,
    read_space,
    usual_space,
)
from minillm_lab.study import Trained, at_pace, graph_of
from minillm_lab.successive_halving import PAIRS, UNIONS, SuccessiveHalving

ABOUT = {"data": "text", "device": "a CPU", "dtype": "float32", "versions": {"minillm-core": "1"}}


def space(*plugins: str, **values: tuple[Any, ...]) -> Space:
    """Build a space of plugins, and of values with ``__`` for the dot."""
    named = {key.replace("__", "."): some for key, some in values.items()}
    return Space(plugins, named, 10**9, shapes=False, options=False)


@pytest.fixture
def planned(asked: Any) -> Callable[[Recipe], Plan]:
    def plan(recipe: Recipe) -> Plan:
        settings = [f"{key}={json.dumps(value)}" for key, value in recipe.settings.items()]
        return build_plan(*asked(*recipe.plugins, settings=settings))

    return plan


@pytest.fixture
def race(tmp_path: Path, planned: Any) -> Callable[..., SuccessiveHalving]:
    def make(rig: Any, searched: Space, base: Recipe = Recipe(), **more: Any) -> SuccessiveHalving:  # noqa: B008
        plan = planned(base)
        members = Members(tmp_path / more.get("folder", "out"), rig, "search", print)
        paired_runs = PairedRuns(
            *(members, plan, Length(tokens=more.get("steps", 100) * plan.tokens_per_step)),
            seed=0,
            speed=more.get("speed", 1e6),
            about=ABOUT,
            say=lambda line: None,
            watch=lambda current, progress: None,
            turns=more.get("turns", True),
        )
        return SuccessiveHalving(
            paired_runs, planned, searched, base, budget=more.get("budget", 1000.0)
        )

    return make


def verdicts(race: SuccessiveHalving, number: int = 0) -> dict[str, str]:
    return {one["name"]: one["verdict"] for one in race.rounds[number]["candidates"]}


def test_a_planted_winner_is_found_and_what_hurts_is_not(race: Any, rigged: Any) -> None:
    found = race(
        rigged({"rule": 0.3, "extension": 0.1, "scale": -0.1}), space("scale", "extension", "rule")
    )
    assert [one.words for one in found.lengths] == [
        "22.8 k tokens",
        "68.3 k tokens",
        "205 k tokens",
    ]
    found.run()
    assert [one["name"] for one in found.steps] == ["+rule", "+extension"]  # it builds on the rule
    assert verdicts(found) == {"+scale": "no gain", "+rule": "accepted"}
    assert found.incumbent == Recipe(frozenset({"rule", "extension"}))
    step = found.steps[0]
    assert step["effect"] == pytest.approx(-0.301, abs=2e-3)
    assert step["low"] < step["effect"] < step["high"] < 0
    gain, parts = found.last["gain"], {one["name"]: one for one in found.last["parts"]}
    assert found.last["seeds"] == [FRESH, FRESH + 1, FRESH + 2]  # not used for selection
    assert gain["effect"] == pytest.approx(-0.402, abs=3e-3)
    assert gain["distinguishable"]
    assert parts["+extension"]["effect"] == pytest.approx(-0.101, abs=2e-3)
    assert "no active plugin provides" in parts["+rule"]["why"]


def test_a_run_alone_is_the_first_of_its_stage(race: Any, rigged: Any) -> None:
    found, seen = race(rigged({}), space("scale")).paired_runs, list[tuple[str, int, int]]()
    found._watch = lambda current, progress: seen.append(
        (current.stage, current.number, current.runs)
    )
    found.alone("to the target", found.base, found.length, 0, "as it is")
    assert {*seen} == {("to the target", 1, 1)}


def test_what_helps_early_and_hurts_late_is_told_by_its_trend(race: Any, rigged: Any) -> None:
    class Fading(rigged):  # type: ignore[misc, valid-type]
        def train(self, plan: Any, seed: int, **more: Any) -> Trained:
            self.gain = {"scale": 0.2 - 0.006 * plan.config.train.steps}
            return super().train(plan, seed, **more)

    rig = Fading({})
    found = race(rig, space("scale"))
    found.run()
    assert verdicts(found) == {"+scale": "helps early, not late"}
    assert max(steps for _, _, steps in rig.made) == 33  # it was never run at full length
    assert found.incumbent == found.base
    assert not found.last


def test_helping_changes_are_put_together_and_idle_ones_left_out(race: Any, rigged: Any) -> None:
    class Early(rigged):  # type: ignore[misc, valid-type]
        """A study in which ``scale`` is noise around 0 at full length."""

        def train(self, plan: Any, seed: int, **more: Any) -> Trained:
            late = plan.config.train.steps == 100
            self.gain = {"rule": 0.3, "scale": 0.03 * (-1) ** seed if late else 0.2}
            return super().train(plan, seed, **more)

    found = race(Early({}), space("rule", "scale"))
    found.run()
    assert found.steps[0]["parts"] == ["+rule", "+scale"]
    assert found.last["dropped"] == ["+scale"]
    assert found.incumbent.plugins == {"rule"}
    assert found.last["gain"]["effect"] == pytest.approx(-0.301, abs=2e-3)


def test_at_full_length_only_candidates_near_the_best_get_further_seeds(
    race: Any, rigged: Any
) -> None:
    class Noisy(rigged):  # type: ignore[misc, valid-type]
        """A study in which ``rule`` and ``scale`` are level at first, and then ``scale`` is behind."""

        def train(self, plan: Any, seed: int, **more: Any) -> Trained:
            self.gain = {"rule": 0.3, "scale": 0.29 - 0.01 * seed}
            return super().train(plan, seed, **more)

    rates = {"train__lr": (0.003, 0.004)}
    found = race(Noisy({}), space("rule", "scale", **rates))
    found._unions = lambda alive: []  # they would win
    found.run()
    pairs = {one["name"]: one["rungs"][-1]["pairs"] for one in found.rounds[0]["candidates"]}
    lengths = {one["name"]: one["rungs"][-1]["length"] for one in found.rounds[0]["candidates"]}
    assert pairs == {"+rule": 2, "+scale": 2, "train.lr=0.004": 1}
    assert lengths["+rule"] == lengths["+scale"] == found.length.words
    assert verdicts(found)["+rule"] == "accepted"
    assert verdicts(found)["+scale"] == "others gained more"


def test_many_parts_are_left_out_with_two_seeds(race: Any, rigged: Any) -> None:
    settings = {"train.lr": 0.004, "train.warmup": 0.2, "train.schedule": "wsd"}
    found = race(rigged({"rule": 0.3}, {"scale": 0.9}), space("rule"))
    recipe = Recipe(frozenset({"rule", "scale"}), settings)
    last = Confirmation(*(found.paired_runs, found._plan, found.base, recipe), pairs=3, budget=1e4)
    last.run()
    rows = {one["name"]: one for one in last.result["parts"]}
    assert len(rows) == 5
    assert {row["pairs"] for row in rows.values()} == {2}
    assert len(last.result["seeds"]) == 3
    # by its two pairs alone: no other set is as far away
    assert 0.01 < rows["+rule"]["high"] - rows["+rule"]["low"] < 0.02
    assert rows["+rule"]["distinguishable"]
    assert rows["+scale"]["speed"]["low"] == pytest.approx(1 / 0.9, rel=1e-6)


def test_a_part_without_which_runs_scatter_does_not_widen_the_intervals_of_others(
    race: Any, rigged: Any
) -> None:
    class Scattering(rigged):  # type: ignore[misc, valid-type]
        """A study in which the worth of ``rule`` differs from seed to seed."""

        def train(self, plan: Any, seed: int, **more: Any) -> Trained:
            self.gain = {"rule": 0.3 + 0.05 * (-1) ** seed}
            return super().train(plan, seed, **more)

    settings = {"train.lr": 0.004, "train.warmup": 0.2, "train.schedule": "wsd"}
    found = race(Scattering({}), space("rule"))
    recipe = Recipe(frozenset({"rule", "scale"}), settings)
    last = Confirmation(*(found.paired_runs, found._plan, found.base, recipe), pairs=3, budget=1e4)
    last.run()
    wide = {one["name"]: one["high"] - one["low"] for one in last.result["parts"]}
    assert wide.pop("+rule") > 0.1
    assert max(wide.values()) < 0.02


class SharedDevice:
    """A pool of processes that share a device, which trains by a study; a step takes 0.1 s."""

    devices, each = ("gpu",), 2

    def __init__(self, study: Any) -> None:
        self.study, self.timed = study, list[tuple[str, bool]]()

    def train(self, wanted: Any, *, watch: Any) -> Any:
        for one in wanted:
            self.timed.append((one.label, one.timed))
            yield Made(one, self.study.train(at_pace(one.plan, 0.1), one.seed))


@pytest.fixture
def confirmed(race: Any) -> Callable[[Any, Recipe], tuple[Confirmation, SharedDevice]]:
    def confirm(study: Any, recipe: Recipe) -> tuple[Confirmation, SharedDevice]:
        found = race(study, space("rule"))
        pool = found.paired_runs._pool = SharedDevice(study)
        found.paired_runs.length = Length(minutes=1 / 6)
        at = found.paired_runs, found._plan, found.base, recipe
        last = Confirmation(*at, pairs=3, budget=1e4)
        last.run()
        return last, pool

    return confirm


def test_on_a_shared_device_parts_are_left_out_by_pace_and_the_gain_is_measured_by_the_clock(
    confirmed: Any, rigged: Any
) -> None:
    study = rigged({"rule": 0.3, "scale": 0.2})
    last, pool = confirmed(study, Recipe(frozenset({"rule", "scale"})))
    assert {*pool.timed} == {
        *(("the recipe", False), ("no +rule", False), ("no +scale", False)),
        *(("the recipe", True), ("as it was", True)),
    }
    assert [one["distinguishable"] for one in last.result["parts"]] == [True, True]
    assert last.result["gain"]["effect"] == pytest.approx(-0.5, abs=5e-3)
    assert len(last.result["base_losses"]) == len(last.result["losses"]) == 3


def test_a_run_file_that_is_cut_short_is_named_and_trained_again_by_the_pool(
    confirmed: Any, rigged: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Recipe(frozenset({"rule"}))
    confirmed(rigged({"rule": 0.3}), recipe)
    torn = min((tmp_path / "out" / "runs").iterdir())
    torn.write_bytes(torn.read_bytes()[:40])
    _, pool = confirmed(rigged({"rule": 0.3}), recipe)
    assert len(pool.timed) == 1
    warning = f"warning: {torn} cannot be read: its run is trained again"
    assert capsys.readouterr().out.count(warning) == 1


def test_where_cards_name_several_plugins_they_are_tried_together_before_anything_else(
    race: Any, rigged: Any
) -> None:
    helpful = {"rule": 0.3, "scale": 0.2, "extension": 0.1}
    prospects = {
        "rule": Prospect(-0.2),
        "scale": Prospect(-0.1),
        "extension": Prospect(-0.1, ("rule",)),
    }
    several = replace(space(*helpful, train__lr=(0.003, 0.004)), prospects=prospects)
    found = race(rigged(helpful), several)
    found.run()
    first, second = ({one["name"] for one in some["candidates"]} for some in found.rounds)
    assert first == {"+rule +scale", "+rule +scale +extension"}
    assert second == {"train.lr=0.004"}
    assert found.incumbent.plugins == {*helpful}


def test_changes_that_need_no_compiling_alternate_with_others_by_time(
    race: Any, rigged: Any
) -> None:
    values = {
        "train__lr": (0.002, 0.003, 0.004),
        "train__warmup": (0.0, 0.1),
        "train__schedule": ("cosine", "wsd"),
    }
    found = race(rigged({}), space("rule", "scale", **values), turns=False)
    cost = found.paired_runs.cost(found.lengths[0])
    found.paired_runs._compiling.append(
        2.0 * cost
    )  # a run that compiles takes as long as three others
    graph = graph_of(found.plan)
    compiled = [graph_of(one.plan) != graph for one in found.candidates() if not one.move.parts]
    assert compiled == [False, True, False, False, False, True, False]


@pytest.mark.parametrize("steps", [100, 20], ids=["long", "too short for a third"])
def test_where_compiling_takes_most_of_a_run_the_first_rung_is_a_pair_at_full_length(
    race: Any, rigged: Any, steps: int
) -> None:
    rig, lines = rigged({"rule": 0.3, "scale": 0.2}), list[str]()
    found = race(rig, space("rule", "scale"), turns=False, budget=1e6, steps=steps)
    found.paired_runs._compiling.append(1e4)
    found.paired_runs.say = lines.append
    found.run()
    assert found.lengths == [found.length]
    assert not any(found.length.words in line for line in lines if line.startswith("no runs of"))
    assert found.incumbent.plugins == {"rule", "scale"}
    lengths = {steps for _, seed, steps in rig.made if seed}
    assert lengths == {steps}
    assert len(rig.made) == len({*rig.made})


def test_where_the_first_rung_has_full_length_its_runs_are_not_counted_again(
    race: Any, rigged: Any
) -> None:
    rates = tuple(0.001 * n for n in range(1, 9))
    found = race(rigged({}), space(train__lr=rates), steps=20)
    assert [one.length for one in found._rungs] == [found.length] * 2
    cost, queued = found.paired_runs.cost(found.length), 8 * found.candidates()[:1]
    assert found._sizes(queued, (1 + 8 + UNIONS + 3 * (PAIRS - 1)) * cost + 1e-6) == [8, 3]


@pytest.mark.parametrize("runs", [1, 2])
def test_a_run_alone_on_the_machine_takes_the_time_of_one_device(
    race: Any, rigged: Any, runs: int
) -> None:
    study, clock = rigged({}), [0.0]

    class TwoDevices(SharedDevice):
        """A pool of two devices, on which a run takes 20 s beside its seconds of training."""

        devices, each = ("gpu:0", "gpu:1"), 1

        def train(self, wanted: Any, *, watch: Any) -> Any:
            for one in wanted:
                made = self.study.train(one.plan, one.seed)
                clock[0] += 1.2 * made.seconds + 20
                yield Made(one, made)

    paired_runs = race(study, space()).paired_runs
    paired_runs._pool, paired_runs.members._clock = TwoDevices(study), lambda: clock[0]
    paired_runs.members.start()
    paired_runs.begin("a stage", runs)
    paired_runs.runs_of({"as it is": paired_runs.base}, paired_runs.length, range(runs))
    beside = 20 if runs == 1 else 2 * (12 + 20) - 12
    assert paired_runs._overheads == [pytest.approx(beside)] * runs


def test_what_other_seeds_do_not_confirm_is_no_result(race: Any, rigged: Any) -> None:
    class Lucky(rigged):  # type: ignore[misc, valid-type]
        def train(self, plan: Any, seed: int, **more: Any) -> Trained:
            self.gain = {"scale": 0.3 if seed < FRESH else 0.1 * (-1) ** seed}
            return super().train(plan, seed, **more)

    found = race(Lucky({}), space("scale"))
    found.run()
    assert [one["name"] for one in found.steps] == ["+scale"]
    assert found.incumbent == found.base
    assert found.last["dropped"] == ["+scale"]


@pytest.mark.parametrize("turns", [True, False])
def test_a_machine_that_gets_quicker_saves_no_time_of_plans_in_turns(
    race: Any, rigged: Any, turns: bool
) -> None:
    class Quicker(rigged):  # type: ignore[misc, valid-type]
        """A study in which each run is 5 % faster than the previous one, and ``scale`` has no visible effect."""

        runs = 0

        def train(self, plan: Any, seed: int, **more: Any) -> Trained:
            self.gain = {"scale": -0.01 if seed % 2 else 0.012}
            self.runs += 1
            found = super().train(plan, seed, **more).data()
            return Trained.of(found | {"tokens_per_second": 1e6 * 1.05**self.runs})

    found = race(Quicker({}), space("scale"), turns=turns)
    found.run()
    assert [one["saves"] for one in found.steps] == ([] if turns else ["time"])


def test_a_setting_moves_to_its_neighbours_only_and_never_back(race: Any, rigged: Any) -> None:
    class Rated(rigged):  # type: ignore[misc, valid-type]
        """A study whose best learning rate is 0.012; that of tiny is 0.003."""

        def train(self, plan: Any, seed: int, **more: Any) -> Trained:
            found = super().train(plan, seed, **more)
            off = abs(plan.config.train.lr - 0.012) * (20 + seed % 3)
            last = found.curve[-1]
            return Trained.of(
                {**found.data(), "curve": [{**vars(last), "val_loss": last.val_loss + off}]}
            )

    rates = (0.0015, 0.003, 0.006, 0.012, 0.024)
    found = race(Rated({}), space(train__lr=rates))
    found.run()
    assert [one["name"] for one in found.steps] == ["train.lr=0.006", "train.lr=0.012"]
    assert found.incumbent.settings == {"train.lr": 0.012}
    raced = {name for n in range(len(found.rounds)) for name in verdicts(found, n)}
    assert raced == {f"train.lr={rate}" for rate in (0.0015, 0.006, 0.012, 0.024)}


def test_a_plugin_whose_reference_model_is_missing_is_refused_and_the_others_are_tried(
    race: Any, rigged: Any
) -> None:
    found = race(rigged({}), space("compared", "scale"))
    assert [one.move.name for one in found.candidates()] == ["+scale"]
    assert found.refused == {"+compared": "no/such/run holds no run"}


@pytest.mark.parametrize(
    ("gains", "diverges", "left"),
    [
        ({"rule": 0.3}, "rule", set()),
        ({"rule": 0.3, "scale": 0.2}, "rule", {"scale"}),
        ({"rule": 0.3, "scale": 0.2}, "both", {"rule"}),  # the better of the two that train
        ({"rule": 0.3, "scale": 0.2}, "each", set()),
        ({"rule": 0.3, "scale": 0.2, "extension": 0.1}, "rule", {"scale"}),  # it builds on the rule
    ],
)
def test_a_recipe_that_diverges_with_a_fresh_seed_is_no_result(
    job: Any, measured: Any, tmp_path: Path, gains: Any, diverges: str, left: set[str]
) -> None:
    class Diverging(measured):  # type: ignore[misc, valid-type]
        def train(self, plan: Any, seed: int, **more: Any) -> Trained:
            names = {one.name for one in plan.active}
            here = {"both": names == {*gains}, "each": bool(names)}
            if seed == FRESH + 1 and here.get(diverges, diverges in names):
                raise NonFinite("10 of the last 100 steps were not finite")
            return super().train(plan, seed, **more)

    found = job(Diverging(gains), space(*gains))
    result = found.run()
    assert {one for step in result["steps"] for one in step["parts"]} == {f"+{o}" for o in gains}
    assert found.halving.incumbent.plugins == left
    assert {*result["last"]["dropped"]} == {f"+{one}" for one in {*gains} - left}
    assert len(result["last"]["losses"]) == len(result["last"]["base_losses"]) == 3
    best, page = ((tmp_path / "out dir" / name).read_text() for name in ("best.toml", "search.md"))
    said = "he accepted recipe failed with a fresh seed (10 of the last 100 steps were not finite)"
    assert said in best
    assert said in page
    assert ("settings as they were: " in best) == bool(left)  # a gain
    assert "The settings stay as they were" in headline(result) or left
    if left:
        part = next(one for one in result["last"]["parts"] if one["name"][1:] in left)
        assert part["effect"] == pytest.approx(result["last"]["gain"]["effect"])
        assert part["distinguishable"]


@pytest.mark.parametrize("later", [2, 3], ids=["in a round", "with more pairs"])
def test_of_an_incumbent_that_diverges_no_candidate_is_blamed(
    race: Any, rigged: Any, later: int
) -> None:
    class Diverging(rigged):  # type: ignore[misc, valid-type]
        """A study in which ``rule`` diverges with a seed that the first round does not need."""

        def train(self, plan: Any, seed: int, **more: Any) -> Trained:
            names, steps = {one.name for one in plan.active}, plan.config.train.steps
            if names == {"rule"} and seed == later and steps == 100:
                raise NonFinite("10 of the last 100 steps were not finite")
            noise = 0.05 * (-1) ** seed if "rule" in names else 0.0  # only a third pair decides
            self.gain = {"rule": 0.3, "scale": 0.1 + noise if steps == 100 else 0.3}
            return super().train(plan, seed, **more)

    found = race(Diverging({}), space("rule", "scale"))
    found._unions = lambda alive: []
    found.run()
    first, second, third = found.rounds
    assert first["accepted"] == "+rule"
    assert second["taken_back"] == {
        "name": "+rule",
        "why": "10 of the last 100 steps were not finite",
    }
    assert verdicts(found, 1)["+scale"].startswith("not judged")
    assert (third["incumbent"], third["accepted"]) == ([], "+scale")
    assert [one["name"] for one in found.steps] == ["+scale"]
    assert found.incumbent.plugins == {"scale"}


def test_a_failed_member_is_a_finding(race: Any, rigged: Any) -> None:
    rig = rigged({"rule": 0.3})
    rig.diverges = {("scale", 0)}
    found = race(rig, space("rule", "scale"))
    found.run()
    assert verdicts(found)["+scale"].startswith("failed: 10 of the last 100 steps")
    assert found.incumbent.plugins == {"rule"}


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 7, 20])
def test_a_stopped_search_ends_as_one_that_was_not(race: Any, rigged: Any, after: int) -> None:
    gains, searched = (
        {"rule": 0.3, "extension": 0.1, "scale": -0.1},
        space("scale", "extension", "rule"),
    )
    whole = race(rigged(gains), searched, folder="whole")
    whole.run()
    rig = rigged(gains)
    rig.stop_after = after
    with pytest.raises(Interrupted):
        race(rig, searched).run()
    made, rig.stop_after = list(rig.made), None
    found = race(rig, searched)
    found.run()
    assert (found.steps, found.last, found.rounds) == (whole.steps, whole.last, whole.rounds)
    assert len(rig.made) == len(set(rig.made))  # no run was repeated
    assert rig.made[:after] == made


def test_a_small_budget_races_fewer_and_says_which_were_not_tried(race: Any, rigged: Any) -> None:
    rates = tuple(0.001 * n for n in range(1, 9))
    found = race(
        rigged({}),
        space("rule", "scale", train__betas=((0.8, 0.9), (0.7, 0.9)), train__lr=rates),
        budget=30.0,
        speed=1e5,  # used for time estimates; runs take no time, and pauses of a busy machine must not count
    )
    assert found.least_cost() == pytest.approx(
        12 * (1.2 * 2.048 + 1.0)
    )  # plus a second of overhead per run
    offered = {one.move.name for one in found.candidates()}
    found.run()
    raced = [
        {one["name"] for one in each["candidates"] if not one["parts"]} for each in found.rounds
    ]
    assert raced  # the number of rounds depends on the clock of this machine
    assert len(raced[0]) < len(offered)
    assert offered - set().union(*raced) == {*found.untried}


class Recipes:
    """The plans of a job."""

    base = Recipe()

    def __init__(self, plan: Callable[[Recipe], Plan]) -> None:
        self._plan = functools.cache(
            lambda plugins, settings: plan(Recipe(plugins, dict(settings)))
        )

    def __call__(self, recipe: Recipe) -> Plan:
        return self._plan(recipe.plugins, tuple(recipe.settings.items()))


@pytest.fixture
def job(tmp_path: Path, planned: Any) -> Callable[..., Job]:
    """Return a function that makes the job of a search in a folder, by a study."""
    plans = Recipes(planned)
    about = {
        **{"data": {"description": "a text"}, "device": "a CPU", "dtype": "float32", "plugins": []},
        **{"versions": {}, "preset": "tiny", "backend": "torch", "hardware": {}, "commit": None},
        **{"date": "2026-11-24", "asked": {"seed": 0}},
    }

    def make(
        study: Any, searched: Space, say: Any = lambda line: None, **length: float | None
    ) -> Job:
        length = length or {"tokens": 100 * plans(plans.base).tokens_per_step}
        where = {"runs": tmp_path, "cache": tmp_path}
        request = Request(RunRequest(), say=say, budget=1e3, **length, **where)
        about["asked"] |= {"target": request.target, "space": searched.data()}
        about["prospects"] = []
        binding = SimpleNamespace(device="cpu", compile=True, backend="torch")
        more = {"binding": binding, "stop": StopRequest()}
        return Job(request, tmp_path / "out dir", study, plans, searched, about, **more)

    return make


@pytest.fixture
def measured(rigged: Any) -> type:
    class Measured(rigged):  # type: ignore[misc, valid-type]
        """A study that measures a baseline, and records when its compiled trainer is freed."""

        log: tuple[str, ...] = ()

        def measure(self, plan: Plan, seed: int) -> dict[str, Any]:
            self.log += ("measure",)
            return {"tokens_per_second": 1e6, "peak_bytes": None, "device_bytes": None}

        def release(self) -> None:
            self.log += ("release",)

        def train(self, plan: Plan, seed: int, **more: Any) -> Trained:
            self.log += ("train",)
            return super().train(plan, seed, **more)

    return Measured


def test_a_search_without_a_pool_frees_the_trainer_that_was_measured(
    job: Any, measured: Any
) -> None:
    study, lines = measured({}), list[str]()
    job(study, space("scale", muon__lr=(0.01, 0.02), xsa__by=(1,)), lines.append).run()
    assert study.log[:3] == ("measure", "release", "train")
    idle = (
        "options of muon and xsa are not tried: they are not enabled, and not in the space's list"
    )
    assert any(line.startswith(idle) for line in lines)


def test_a_resumed_search_keeps_the_result_until_it_has_reached_as_far(
    job: Any, measured: Any, tmp_path: Path
) -> None:
    study, searched = measured({"rule": 0.3, "extension": 0.1}), space("extension", "rule")
    study.stop_after = 12
    with pytest.raises(Interrupted):
        job(study, searched).run()
    out = tmp_path / "out dir"
    kept = {name: (out / name).read_bytes() for name in ("best.toml", "search.json", "search.html")}
    earlier = json.loads(kept["search.json"])
    assert earlier["rounds"]
    again = job(study, searched)
    taken, study.stop_after = again.members.take, 12

    def take(*given: Any) -> Any:
        assert {name: (out / name).read_bytes() for name in kept} == kept
        return taken(*given)

    again.members.take = take
    with pytest.raises(Interrupted):
        again.run()
    study.stop_after = None
    result = job(study, searched).run()
    assert json.loads((out / "search.json").read_text())["finished"]
    assert len(result["rounds"]) >= len(earlier["rounds"])


@pytest.mark.parametrize(
    "damage",
    [{"asked": []}, {"measured": "x"}, {"measured": {"peak_bytes": 1}}, {"spent_seconds": None}],
)
def test_a_damaged_result_is_named(
    job: Any, measured: Any, tmp_path: Path, damage: dict[str, Any]
) -> None:
    job(measured({}), space("rule")).run()
    path = tmp_path / "out dir" / "search.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(Refusal, match=r"search\.json is not as minillm writes it") as error:
        job(measured({}), space("rule")).run()
    assert str(path) in str(error.value.where)
    assert str(error.value.fix).startswith("restore search.json from a copy, or ")


def test_a_full_disk_does_not_look_like_a_defect_and_the_search_continues(
    job: Any, measured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, lines, full = measured({"rule": 0.3}), list[str](), {"search.html", "search.md"}

    def replaced(path: Path, data: bytes) -> None:
        if path.name in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_file(path, data)

    monkeypatch.setattr("minillm_lab.members.replace_file", replaced)
    full.add("search.json")
    with pytest.raises(MinillmError, match=r"search\.json could not be written") as error:
        job(study, space("rule")).run()
    again = f"--resume --out '{tmp_path / 'out dir'}' continues"
    assert str(error.value.fix).endswith(
        f"make room, or make the folder writable; the same command with {again}"
    )
    full.remove("search.json")
    assert job(study, space("rule"), lines.append).run()["finished"]
    assert [line.partition(" could")[0] for line in lines if "warning" in line] == [
        "warning: search.html",
        "warning: search.md",
    ]


def test_what_is_installed_and_measured_later_does_not_change_a_search_that_is_resumed(
    job: Any, measured: Any
) -> None:
    known = {"scale": Prospect(-0.1, ("rule",)), "rule": Prospect(-0.05)}
    first = replace(space("scale", "rule", train__betas=((0.8, 0.9),)), prospects=known)
    kept = {"space": first.data()}
    listed = [[name, one.gain, one.company] for name, one in known.items()]
    earlier = json.loads(json.dumps({"asked": kept, "prospects": listed}))
    newer = replace(
        space("new", "rule", "scale", train__betas=((0.8, 0.9),)),
        prospects={"rule": Prospect(-0.9)},
    )
    assert begun_with(newer, earlier, plugins=False, values=False) == first
    del earlier["prospects"]  # of a version that did not keep them
    found = begun_with(newer, earlier, plugins=False, values=False)
    assert found == replace(first, prospects=newer.prospects)
    same = replace(newer, plugins=("rule", "scale"))
    assert begun_with(same, earlier, plugins=True, values=True).plugins == first.plugins
    assert begun_with(newer, earlier, plugins=True, values=True) == newer
    taken = begun_with(same, earlier, plugins=False, values=False, removed=["scale"])
    assert taken.plugins == same.plugins
    assert begun_with(newer, {}, plugins=False, values=False) == newer

    study = measured({})
    job(study, space("scale")).run()
    with pytest.raises(Refusal, match="another search: its space differs") as error:
        job(study, space("scale", "rule")).run()
    assert str(error.value.where).endswith("search.json: space, plugins: rule only now")


class ByMinutes:
    """A study whose runs of some minutes have the steps that fit into them."""

    def __init__(self, study: Any) -> None:
        self._study = study

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def train(self, plan: Plan, seed: int, **more: Any) -> Trained:
        minutes = plan.config.train.minutes
        return self._study.train(at_pace(plan, 0.1) if minutes else plan, seed, **more)


def test_a_run_to_a_target_is_shortened_to_a_few_steps_at_least(job: Any, measured: Any) -> None:
    class Reached(measured):  # type: ignore[misc, valid-type]
        """A study in which all runs but the very first reach a loss of 1."""

        def train(self, plan: Plan, seed: int, **more: Any) -> Trained:
            self.gain = {} if not self.made else {"rule": 5.0}
            found = super().train(plan, seed, **more).data()
            first = len(self.made) == 1
            return Trained.of(
                found | {"curve": [{**found["curve"][-1], "val_loss": 3.0 if first else 0.5}]}
            )

        def measure(self, plan: Plan, seed: int) -> dict[str, Any]:
            return super().measure(plan, seed) | {"tokens_per_second": 10 * plan.tokens_per_step}

    study = Reached({})
    result = job(ByMinutes(study), space("rule"), target=1.0).run()
    assert result["finished"]
    assert min(steps for _, _, steps in study.made) == 10
    assert result["target"]["minutes"] >= 10 * 0.1 / 60
    again = job(ByMinutes(study), space("rule"), target=4.0)
    again.earlier = {}
    with pytest.raises(Refusal, match="within 20 steps, the shortest run that is tried") as error:
        again.run()
    assert "a lower --target" in str(error.value.fix)
    again = job(ByMinutes(study), space("rule"), minutes=1e-9)
    again.earlier = {}
    with pytest.raises(Refusal, match="is shorter than a step, which has 2,048 tokens") as error:
        again.run()
    assert (error.value.where, error.value.fix) == ("--minutes 1e-09", "--minutes 0.033")


def test_the_command_that_trains_the_recipe_names_single_files(
    job: Any, measured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    found = job(measured({"rule": 0.3}), space("rule"), lambda line: print(line))
    result = found.run()
    best = tmp_path / "out dir" / "best.toml"
    command = f"minillm train --preset '{best}' --plugins "
    assert result["command"].startswith(
        command
    )  # the plugins of these tests are in no distribution
    assert best.read_text().startswith(f"# {result['command']}\n")
    monkeypatch.setattr("minillm_lab.search.search", lambda request: (result, found.out))
    show_search(found.request, json=False)
    assert capsys.readouterr().out.endswith(f"{result['command']}\n")


# The space


def test_installed_plugins_that_are_broken_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [PluginEntry(name, "one", "1", f"{name}:X") for name in ("good", "left", "bad")]
    entries[2] = replace(entries[2], broken="two distributions offer it")
    monkeypatch.setattr("minillm_lab.space.installed_plugins", lambda: entries)
    assert installed({"left"}, 0) == ["good"]


def test_a_plugin_that_cannot_be_imported_is_left_out_unless_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text(
        "from minillm_core import Plugin\nclass Torn(Plugin, api=1):\n"
    )
    plugins, lines = {"muon": "muon", "torn": f"{tmp_path / 'torn.py'}:Torn"}, list[str]()
    assert [*prospects(plugins, equal_seconds=True, leave_out=lines.append)] == ["muon"]
    (line,) = lines
    assert line.startswith("not tried: torn: ")
    with pytest.raises(MinillmError):
        prospects(plugins, equal_seconds=True)


@pytest.fixture
def read(tmp_path: Path, planned: Any) -> Callable[[str], Space]:
    def read(text: str) -> Space:
        path = tmp_path / "space.toml"
        path.write_text(text)
        usual = usual_space(planned(Recipe()), ["muon", "qk_norm"], 10**7)
        return read_space(path, usual, ["muon", "qk_norm"])

    return read


def test_a_space_file_names_all_that_is_tried(read: Any) -> None:
    found = read(
        'plugins = "installed"\nparameters = 5_000_000\n'
        "[train]\nlr = { from = 1e-3, to = 8e-3 }\nrows = { from = 4, to = 32 }\nbetas = [[0.8, 0.95]]\n"
        "clip = { from = 0.0, to = 1.0 }\n[muon]\nlr = [0.01, 0.04]\n"
    )
    assert found.plugins == ("muon", "qk_norm")
    assert found.parameters == 5_000_000
    assert not found.shapes
    assert not found.options
    assert found.values == {
        "train.lr": (0.001, 0.002, 0.004, 0.008),
        "train.rows": (4, 8, 16, 32),
        "train.betas": ((0.8, 0.95),),
        "train.clip": (0.0, 0.25, 0.5, 0.75, 1.0),
        "muon.lr": (0.01, 0.04),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[train", "cannot be read"),
        ("", "the space is empty"),
        ("[trian]\nlr = [0.1]", "did you mean train"),
        ("[train]\nlearn = [0.1]", "no 'learn' to search"),
        ("[muon]\nlrr = [0.1]", "did you mean lr"),
        ("[data]\nseed = [1]", "no 'data' to search"),
        ("[train]\nsteps = [10]", "--minutes, --tokens or --target is the length"),
        ("[model]\nvocab = [300]", "another tokenizer"),
        ("[train]\nlr = 0.1", "must be a list of values or a range"),
        ("[train]\nlr = { from = 0.1 }", "must be a list of values or a range"),
        ("[train]\nlr = { from = 0.1, to = 0.01 }", "goes from 0.1 to 0.01"),
        ('plugins = ["moun"]', "did you mean muon"),
        ("plugins = 3", "must be a list of names"),
        ("shapes = 1", "must be true or false"),
        ("[train]\nlr = { from = 0.1, to = inf }", "too wide: it may double 32 times"),
        ("[train]\nlr = { from = 1e-300, to = 1e300 }", "too wide"),
        ("[train]\nlr = { from = -1e300, to = 1e300 }", "too wide"),
        (f"[train]\nrows = {{ from = 1, to = {10**400} }}", "too wide"),
        ("[train]\nlr = { from = true, to = 2 }", "must be a list of values or a range"),
        ("[train]\nrows = { from = 2, to = 2.5 }", "train.rows takes whole numbers"),
        ("parameters = -5", "parameters must be above 0, not -5"),
        ('plugins = ["muon", "muon"]', "muon is named twice"),
    ],
)
def test_a_space_file_that_cannot_be_used_is_refused(read: Any, text: str, said: str) -> None:
    with pytest.raises(Refusal) as error:
        read(text)
    assert said in f"{error.value.what} {error.value.fix}"
    assert "space.toml" in str(error.value.where)


def test_values_that_plugins_declare_can_be_given() -> None:
    declared = 0
    for entry in installed_plugins():
        if entry.broken:
            continue
        plugin = find_plugin(entry.name)
        for name, info in plugin.cls.model_fields.items():
            extra = info.json_schema_extra
            some = extra.get("search") if isinstance(extra, dict) else None
            for value in some if isinstance(some, list) else ():
                assert getattr(with_options(plugin, {name: value}).plugin, name) == value
                declared += 1
    assert declared > 100


def test_times_are_read() -> None:
    assert [seconds_of(text) for text in ("20m", "1h30m", "90s", "1.5")] == [1200, 5400, 90, 5400]


# The page


def test_the_page_shows_the_lineage_and_all_that_became_of_the_rest(
    race: Any, rigged: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = race(
        rigged({"rule": 0.3, "extension": 0.1, "scale": -0.1}), space("scale", "extension", "rule")
    )
    found.run()
    result = {
        "length": {"minutes": None, "tokens": found.length.tokens, "words": found.length.words},
        "rungs": [one.words for one in found.lengths],
        **{"budget_seconds": 900.0, "spent_seconds": 60.0, "steps": found.steps},
        **{"recipe": ["+extension", "+rule"], "last": found.last, "target": {}},
        **{"rounds": found.rounds, "refused": {"+<b>": "it | fits"}, "untried": ["+windows"]},
        **{"finished": True, "preset": "tiny", "plugins": [], "asked": {"seed": 0}},
        **{
            "data": {"description": "a text"},
            "backend": "torch",
            "device": "cpu",
            "dtype": "float32",
        },
        **{"hardware": {}, "versions": {}, "commit": None, "date": "2026-11-24"},
    }
    assert headline(result).startswith("+extension, +rule: −0.40")
    assert ", measured with fresh seeds that played no part in the selection. " in headline(result)
    gone = "The accepted changes made no measurable difference with fresh seeds, and were dropped: "
    assert headline({**result, "recipe": []}).startswith(gone)
    html, text = search_page(result), markdown(result)
    assert "+&lt;b&gt;" in html and "<b>" not in html  # noqa: PT018
    assert "it \\| fits" in text
    for shown in (
        "Lineage",
        "The last comparison",
        "Round 1: +rule",
        "Refused by planning",
        "Not tried",
    ):
        assert shown in html
        assert shown in text
    assert "Trends" in html
    assert "by pace" not in text
    taken_back = {**found.rounds[0], "taken_back": {"name": "+rule", "why": "it diverged"}}
    said = "+rule is taken back, since a run of the recipe with it failed: it diverged."
    assert said in markdown({**result, "rounds": [taken_back]})
    assert "by pace: minutes were converted to steps" in markdown({**result, "by_pace": True})
    aimed = {**result, "asked": {"seed": 0, "target": 3.5}}
    missed = "A held-out loss of 3.5 is not reached by the recipe in 205 k tokens of training."
    assert headline(aimed).endswith(missed)
    aimed["target"] = {"minutes": 0.1, "seconds": 6.25, "loss": 3.49}
    assert headline(aimed).endswith("A held-out loss of 3.5 is reached in 6.2 s of training.")
    for page in (search_page(aimed), markdown(aimed)):
        assert "A recipe for a loss of 3.5 of tiny" in page
    unfinished = {**result, "finished": False, "last": {}}
    assert "Not finished" in search_page(unfinished)
    out = tmp_path / "search"
    out.mkdir()
    (out / "search.json").write_text(json.dumps(result))
    assert main(["report", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out / "search.html")
    assert (out / "search.html").read_text() == html
    (out / "search.json").write_text('{"finished": false}')  # as a search for a loss begins
    assert main(["report", str(out)]) == 2
    assert "ended before it compared anything" in capsys.readouterr().err
