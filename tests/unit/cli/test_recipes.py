"""Tests of ``--preset speedrun``, a preset that names plugins, through the program."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoints
from pathlib import Path

import pytest

from minillm_core.cli import plan, train
from minillm_core.cli.plugin_facts import info, planned_on
from minillm_core.config.presets import SHAPES, plugins_of, recipe_names
from minillm_core.plugins.discover import GROUP
from minillm_core.plugins.first_party import FIRST_PARTY
from minillm_core.train.request import Prepared, RunRequest
from minillm_lab.cli import ablate, bench
from minillm_lab.cli.ablate import show_ablation

Program = Callable[..., tuple[int, str, str]]

RECIPE = "speedrun"
NAMED = tuple(plugins_of(RECIPE))
GONE = next(name for name in NAMED if name != "muon")  # others build on muon
MORE = next(name for name in ("xsa", "residual_decay") if name not in NAMED)
PLAN = ("plan", "--preset", RECIPE)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Hide all plugins of one distribution."""
    from minillm_core.plugins import discover, first_party

    found, version = discover.entry_points, first_party.installed_version

    def go(*distributions: str) -> None:
        def others(*, group: str) -> EntryPoints:
            points = found(group=group)
            if group != GROUP:
                return points
            gone = {one for one in points if one.dist and one.dist.name in distributions}
            return EntryPoints(one for one in points if one not in gone)

        def version_of(name: str) -> str | None:
            return None if name in distributions else version(name)

        monkeypatch.setattr(discover, "entry_points", others)
        monkeypatch.setattr(first_party, "installed_version", version_of)

    return go


@pytest.mark.slow
def test_the_plan_says_which_settings_are_the_presets(program: Program) -> None:
    code, out, err = program(*PLAN, "train.rows=16", "train.accumulate=4", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert [one["name"] for one in document["plugins"]] == sorted(NAMED)
    told = document["settings"]
    for name, options in plugins_of(RECIPE).items():
        assert told["plugins"][name]["origin"] == f"preset {RECIPE}"
        for key, value in options.items():
            entry = {"value": value, "origin": f"preset {RECIPE}"}
            assert told["plugins"][name]["options"][key] == entry
    assert told["train"]["rows"] == {"value": 16, "origin": "command line"}
    shown = program(*PLAN, "muon.lr=0.5")[1]
    settings = shown.partition("settings from")[2]
    preset, _, typed = settings.partition("command line")
    assert f"preset {RECIPE}" in preset
    assert all(name in preset for name in NAMED)
    given = [f"{name}.{key}=" for name, options in plugins_of(RECIPE).items() for key in options]
    assert [one for one in given if one not in preset] == ["muon.lr="]
    assert typed.split() == ["muon.lr=0.5"]
    stages = "train.stages=[{until = 0.25, rows = 4}, {until = 1.0, rows = 8, seq_len = 64}]"
    assert stages in " ".join(program(*PLAN, stages)[1].split())


@pytest.mark.slow
def test_a_plugin_can_be_taken_away_and_the_difference_be_seen(program: Program) -> None:
    assert GONE not in program(*PLAN, "--plugins", f"-{GONE}", "--json")[1]
    code, out, _ = program(*PLAN, "--diff", "", f"-{GONE}", "--json")
    assert code == 0
    whole, less = json.loads(out)["difference"]["plugins"]
    assert set(whole) - set(less) == {GONE}
    code, _, err = program(*PLAN, "--plugins", f"-{GONE}x")
    assert code == 2
    assert f"fix:   -{GONE}" in err


@pytest.mark.parametrize("command", ["plan", "train"])
def test_without_its_distributions_one_line_installs_them_all(
    program: Program, absent, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    needed = sorted({FIRST_PARTY[name] for name in NAMED})
    absent(*needed)
    code, out, err = program(command, "--preset", RECIPE)
    assert (code, out) == (2, "")
    assert f"{len(NAMED)} plugins of this run are not installed: {', '.join(sorted(NAMED))}" in err
    (fix,) = [line for line in err.splitlines() if "fix:" in line]
    words = shlex.split(fix.removeprefix("  fix:"))
    assert words[: 2 + len(needed)] == ["pip", "install", *needed]
    assert err.count("pip install") == 1
    assert sys.executable in err
    assert list(tmp_path.iterdir()) == []


def test_those_that_are_there_are_not_named(program: Program, absent) -> None:
    absent("minillm-muon")
    more = {"normuon", "polar_express"}
    _, _, err = program(*PLAN, "--plugins", ",".join(more - set(NAMED)))
    ours = sorted({name for name in NAMED if FIRST_PARTY[name] == "minillm-muon"} | more)
    assert f"not installed: {', '.join(ours)}\n" in err
    assert "pip install minillm-muon" in err
    assert "minillm-modded" not in err


def test_one_that_is_too_old_is_upgraded(
    program: Program, absent, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minillm_core.plugins import first_party

    absent("minillm-modded")
    monkeypatch.setattr(first_party, "installed_version", lambda name: "0.0.1")
    assert "pip install --upgrade minillm-modded" in program(*PLAN)[2]


@pytest.mark.parametrize("command", ["train", "plan", "ablate", "bench"])
def test_help_names_every_preset(program: Program, command: str) -> None:
    out = " ".join(program(command, "--help")[1].replace("│", " ").split())
    assert f"{', '.join(SHAPES)}; with plugins: {', '.join(recipe_names())};" in out


@pytest.mark.parametrize("page", [train.EXAMPLES, plan.EXAMPLES, ablate.EXAMPLES, bench.EXAMPLES])
def test_an_example_takes_away_what_the_preset_names(page: str) -> None:
    lines = [line.split() for line in page.splitlines() if f"--preset {RECIPE}" in line]
    for name in [word[1:] for words in lines for word in words if re.match(r"-\w{2}", word)]:
        assert name in NAMED


def test_info_says_which_presets_name_a_plugin(program: Program) -> None:
    document = json.loads(program("plugins", "info", "muon", "--json")[1])
    assert document["presets"] == {name: plugins_of(name)["muon"] for name in recipe_names()}
    assert json.loads(program("plugins", "info", "tensorboard", "--json")[1])["presets"] == {}
    assert f"in {RECIPE}" in program("plugins", "info", "muon")[1]


def test_the_slots_of_a_plugin_are_those_with_the_presets_options() -> None:
    """At its defaults role_lr has no effect."""
    assert info("role_lr", planned_on(RECIPE))["slots"] == []
    assert info("role_lr", planned_on(RECIPE), {"role_lr": {"head": 2.0}})["slots"]


@pytest.mark.parametrize(
    ("judged", "company", "expected"),
    [
        (None, None, NAMED),
        (f"-{GONE}", None, tuple(name for name in NAMED if name != GONE)),
        (f"muon,{MORE}", None, ("muon", MORE)),
        (f"muon,-{GONE}", None, ("muon",)),
        (None, "muon", tuple(name for name in NAMED if name != "muon")),
    ],
)
def test_an_ablation_judges_those_that_are_named_or_else_the_presets(
    monkeypatch: pytest.MonkeyPatch, judged: str | None, company: str | None, expected: tuple
) -> None:
    asked_for = []

    class Enough(Exception):
        pass

    def stop(request, **more):
        asked_for.append((request.judged, set(request.prepared.loaded.specs)))
        raise Enough

    monkeypatch.setattr("minillm_lab.ablate.ablate", stop)
    plugins = ",".join(part for part in (company, judged) if part) or None
    with pytest.raises(Enough):
        show_ablation(
            RunRequest(plugins=plugins, preset=RECIPE, flags={"--device": "cpu"}),
            judged=judged,
            company=company,
            seeds=1,
            minutes=None,
            leave_one_out=True,
            out=None,
            json=False,
        )
    ((found, active),) = asked_for
    assert sorted(found) == sorted(expected)
    without = {GONE} if judged and f"-{GONE}" in judged else set()
    assert active == (set(NAMED) | set(expected)) - without


def test_a_bench_compares_the_recipe_with_less_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunRequest] = []

    class Enough(Exception):
        pass

    def note(asked: RunRequest, *, to_run: bool) -> Prepared:
        seen.append(asked)
        if len(seen) == 2:
            raise Enough
        return None  # type: ignore[return-value]

    monkeypatch.setattr("minillm_core.studies.prepare", note)
    asked = RunRequest(
        plugins=f"-{GONE},{MORE}", preset=RECIPE, assignments=(f"{GONE}.layers=0", "seed=2")
    )
    with pytest.raises(Enough):
        bench.show_bench(asked, None, against="none", json=False)  # type: ignore[arg-type]
    less, whole = seen
    assert (less.plugins, less.assignments) == (f"-{GONE},{MORE}", ("seed=2",))
    assert (whole.plugins, whole.assignments) == (None, (f"{GONE}.layers=0", "seed=2"))
