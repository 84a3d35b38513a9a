"""Tests of the trials' own checks: differences are reported, and damage is real."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.trials import hostile
from benchmarks.trials.bench import Row, table
from benchmarks.trials.compare import differences, events, newest_step, state
from benchmarks.trials.damage import KINDS, link
from benchmarks.trials.tiny_run import TinyRun
from minillm_core.checkpoint import layout
from minillm_core.checkpoint.commit import commit
from minillm_core.checkpoint.manifest import verify

STEPS = (4, 8, 12)


@pytest.fixture
def run(tmp_path: Path):
    """Create a run folder that ended normally."""

    def make(name: str) -> Path:
        out = tmp_path / name
        out.mkdir()
        for step in STEPS:
            rng = np.random.default_rng(step)
            arrays = {
                "model.w": rng.normal(size=(40, 64)).astype(np.float32),
                "optimizer.adamw.m.w": rng.normal(size=(40, 64)).astype(np.float32),
            }
            commit(out, step, arrays, {"step": step, "elapsed_seconds": random.random()})
        lines = [
            {"event": "step", "step": step, "loss": 1 / step, "step_seconds": random.random()}
            for step in range(1, 13)
        ]
        lines += [{"event": "eval", "step": 12, "val_loss": 0.5}]
        (out / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        (out / "run.json").write_text('{"exit": 0}')
        (out / "tokenizer.json").write_text("{}")
        return out

    return make


def change_a_bit(out: Path) -> None:
    path = layout.folder(out, 12)
    held = {"model.w": np.zeros((40, 64), np.float32), "optimizer.adamw.m.w": np.zeros(1)}
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    commit(out, 12, held, {"step": 12, "elapsed_seconds": 0})


def change_a_scalar(out: Path) -> None:
    path = layout.folder(out, 12) / "state.json"
    path.write_text(path.read_text().replace('"step": 12', '"step": 11'))


def edit(old: str, new: str):
    def change(out: Path) -> None:
        path = out / "metrics.jsonl"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (change_a_bit, "model.w differs"),
        (change_a_scalar, "does not verify"),
        (edit('"loss": 0.25', '"loss": 0.2500001'), "instead of"),
        (edit('{"event": "step", "step": 3,', '{"event": "step", "step": 2,'), "events of steps"),
        (edit('"val_loss": 0.5}\n', '"val_loss": 0.5}\n{"event": "eval", "step": 12}\n'), "eval"),
        (lambda out: (out / "tokenizer.json").write_text("{ }"), "tokenizer"),
        (lambda out: (out / "run.json").write_text('{"exit": 75}'), "exit 75"),
        (lambda out: (out / "run.json.tmp-ab").touch(), "left over"),
        (lambda out: layout.folder(out, 4).rename(layout.folder(out, 5)), "instead of"),
    ],
)
def test_every_difference_is_told(run, change, told: str) -> None:
    a, b = run("a"), run("b")
    assert differences(a, b) == []
    change(b)
    assert any(told in text for text in differences(a, b))


def test_what_a_folder_holds(run, tmp_path: Path) -> None:
    out = run("a")
    assert (state(out), newest_step(out), len(events(out, "step"))) == ("whole", 12, 12)
    (layout.folder(out, 8) / "manifest.json").unlink()
    assert state(out) == "corrupt"
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "st')
    assert len(events(out, "step")) == 12
    empty = tmp_path / "nothing"
    assert (state(empty), newest_step(empty), events(empty, "step")) == ("none", 0, [])


@pytest.mark.parametrize("kind", KINDS)
def test_every_damage_is_one_and_leaves_the_original_alone(run, tmp_path: Path, kind: str) -> None:
    good = run("good")
    for seed in range(12):
        out = tmp_path / f"copy-{seed}"
        link(good, out)
        said = KINDS[kind](layout.folder(out, 12), layout.folder(out, 8), random.Random(seed))
        assert said
        assert verify(layout.folder(out, 12)), said
        assert not any(verify(layout.folder(good, step)) for step in STEPS), said


def test_what_is_made_up_is_the_same_for_a_seed(run, tmp_path: Path) -> None:
    good = layout.folder(run("good"), 12)
    seen = set()
    for seed in range(40):
        made = []
        for copy in "ab":
            bad = tmp_path / f"{copy}{seed}"
            bad.mkdir()
            what = hostile.mutate(random.Random(seed), good, bad)
            made.append({path.name: path.read_bytes() for path in bad.iterdir()})
        assert made[0] == made[1]
        assert any((good / name).read_bytes() != made[0][name] for name in hostile.TARGETS), what
        seen.add(what.partition(":")[0])
    assert seen == set(hostile.TARGETS)


def test_a_made_up_manifest_is_sealed_as_ours_is(run) -> None:
    data = (layout.folder(run("good"), 12) / layout.MANIFEST).read_bytes()
    assert hostile.sealed(json.loads(data)) == data


def test_the_table_lines_up() -> None:
    rows = [
        Row("kills", 1200, 1200, 3, 4, {"kills": 1300, "seconds": 0.25}),
        Row("x", failed=["y"]),
    ]
    head, first, second = table(rows).splitlines()
    assert head.index("of these") == first.index("kills 1,300, seconds 0.25")
    assert "3 of 4" in first
    assert second.split() == ["x", "0", "0", "0", "of", "0", "1"]


def test_a_resume_says_the_same_and_more(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, "mlx", plugins="muon", settings=("checkpoint.keep=4",))
    plain, resumed = (run.arguments(tmp_path / "out", resume=one) for one in (False, True))
    assert [one for one in resumed if one != "--resume"] == plain
    assert plain[-1] == "checkpoint.keep=4"
