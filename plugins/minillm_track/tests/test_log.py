"""Every tracker receives each step of metrics.jsonl once, in the run's order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core import (
    Ended,
    Evaluated,
    Event,
    Guarded,
    PluginError,
    Refusal,
    Resumed,
    Rewound,
    Sampled,
    Saved,
    Skipped,
    Started,
    Stepped,
    Throughput,
    Unsaved,
)
from minillm_core.plugins.manager import find, load
from minillm_core.train.metrics import METRICS, Metrics, truncate
from minillm_core.train.run_folder import check_named_again
from minillm_track.entries import figures, flat, line
from minillm_track.log import Log, identity, inside


class Sink:
    """A recording sink that revokes entries on a rewind, as a good tracker does."""

    forgets = False

    def __init__(self, at: int) -> None:
        self.at, self.steps, self.lines = at, [], []
        self.code: int | None = None

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        assert self.code is None
        self.steps.append(step)

    def line(self, kind: str, step: int, text: str) -> None:
        self.lines.append((step, text))

    def back(self, step: int, to: int) -> None:
        self.steps = [s for s in self.steps if s <= to]

    def close(self, code: int) -> None:
        self.code = code


def stepped(n: int) -> Stepped:
    return Stepped(n, 1.0, 0.1, n, Throughput(1.0, 1.0, 1.0), 0.1, 0.4, 7, 1.0)


def opened() -> tuple[Log, list[Sink]]:
    sinks: list[Sink] = []

    def open_run(started: Started, at: int) -> Sink:
        sinks.append(Sink(at))
        return sinks[-1]

    return Log(open_run), sinks


@pytest.mark.slow
@given(st.integers(1, 9), st.integers(1, 30), st.data())
def test_the_steps_are_those_of_metrics_jsonl(
    tmp_path_factory: pytest.TempPathFactory, every: int, steps: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("run") / METRICS
    spike = data.draw(st.integers(1, steps))
    to = data.draw(st.integers(0, spike - 1))
    log, sinks = opened()
    events: list[Event] = [Started("h", steps, 1, ".", {"log": {"every": every}})]
    events += [stepped(n) for n in range(1, spike + 1)] + [Rewound(spike, 9.0, to, 1)]
    events += [stepped(n) for n in range(to + 1, steps + 1)] + [Ended(steps, 0, 1.0)]
    with Metrics(path, every=every) as metrics:
        for event in events:
            metrics(event)
            log(event)
    there = [e["step"] for e in truncate(path, steps) if e["event"] == "step"]
    assert sinks[0].steps == there
    assert sinks[0].code == 0


def test_nothing_is_opened_before_it_is_known_where_the_run_goes_on() -> None:
    log, sinks = opened()
    log(stepped(1))  # without a run: an ablation's
    log(Started("h", 9, 1))
    assert sinks == []
    log(Resumed(4, "checkpoints/step-4"))
    log(stepped(5))
    assert [sink.at for sink in sinks] == [4]
    assert sinks[0].lines == [(4, "resumed from checkpoints/step-4")]
    assert sinks[0].steps == [5]


def test_a_run_whose_opening_failed_still_goes_on_where_it_was() -> None:
    sinks: list[Sink] = []

    def open_run(started: Started, at: int) -> Sink:
        sinks.append(Sink(at))
        if len(sinks) == 1:
            raise OSError("no connection")
        return sinks[-1]

    log = Log(open_run)
    log(Started("h", 9, 1))
    with pytest.raises(OSError, match="no connection"):
        log(Resumed(4, "checkpoints/step-4"))
    for event in (stepped(5), Ended(5, 0, 1.0), Started("h", 9, 1), stepped(1)):
        log(event)
    assert [sink.at for sink in sinks] == [4, 4, 0]


def test_one_plugin_may_see_several_runs() -> None:
    log, sinks = opened()
    for code in (0, 75):
        for event in (Started("h", 9, 1), stepped(1), Ended(1, code, 1.0)):
            log(event)
    log(stepped(2))
    assert [(sink.steps, sink.code) for sink in sinks] == [([1], 0), ([1], 75)]


def test_figures_have_a_name_each_and_the_unknown_is_left_out() -> None:
    known = figures(stepped(3))
    assert known["train/loss"] == 1.0
    assert {
        "speed/mfu": 0.4,
        "memory/peak_bytes": 7.0,
        "train/tokens": 3.0,
    }.items() <= known.items()
    without = Stepped(1, 1.0, 0.1, 1, Throughput(1, 1, 1), 0.1, None, None, 1.0, {"z": 2.0})
    assert {"speed/mfu", "memory/peak_bytes"} & set(figures(without)) == set()
    assert figures(without)["train/terms/z"] == 2.0
    assert figures(Evaluated(2, 4.0, None)) == {"val/loss": 4.0}
    assert figures(Saved(2, "x", 0.1)) == {}


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (Saved(2, "checkpoints/step-2", 0.12), "checkpoint checkpoints/step-2 (0.1 s)"),
        (Sampled(2, "a", "b\n"), "sample at step 2: 'a' is continued with 'b\\n'"),
        (Unsaved(2, "disk full"), "no checkpoint: disk full"),
        (Skipped(2, 3), "a batch without a label was passed over (3 so far)"),
        (Guarded(2, float("nan"), 1.0, 1), "no update: loss nan, gradients' norm 1"),
        (Rewound(9, 8.5, 4, 2), "loss 8.5: back to step 4, 2 batches passed over"),
        (Ended(9, 75, 61.4), "ended after 61 s, exit 75"),
        (Evaluated(2, 4.0, None), None),
    ],
)
def test_what_has_no_figures_is_told_in_words(event, says: str | None) -> None:
    assert line(event) == says


def test_settings_are_flat() -> None:
    given = {"train": {"lr": 0.1, "betas": [0.9, 0.95]}, "seed": 0, "init": None, "a": {"b": {}}}
    assert flat(given) == {"train.lr": 0.1, "train.betas": "[0.9, 0.95]", "seed": 0, "init": "null"}


def test_a_run_keeps_its_name_and_shares_it_with_none(tmp_path: Path) -> None:
    outs = [tmp_path / place / "tiny-1" for place in ("a", "b")]
    for out in outs:
        out.mkdir(parents=True)
    names = [identity(str(out), "wandb") for out in outs]
    assert names[0] != names[1]
    assert all(name.startswith("tiny-1-") for name in names)
    moved = outs[0].rename(tmp_path / "moved")
    assert identity(str(moved), "wandb") == names[0]


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_the_extra_is_what_the_class_requires(name: str) -> None:
    extra = [
        text.partition(";")[0].strip()
        for text in metadata("minillm-track").get_all("Requires-Dist") or ()
        if f"'{name}'" in text or f'"{name}"' in text
    ]
    assert find(name).cls.manifest.requires == tuple(extra)


def test_importing_the_plugins_imports_no_tracker() -> None:
    names = "tensorboard, trackio, wandb"
    script = (
        f"import sys; from minillm_track import {names}\n"
        "print([n for n in ('tensorboard', 'trackio', 'wandb', 'torch', 'mlx') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stderr


# An untrusted folder


def test_the_name_of_a_run_is_not_read_through_a_link(tmp_path: Path) -> None:
    kept = identity(str(tmp_path), "wandb")
    assert identity(str(tmp_path), "wandb") == kept
    (tmp_path / "trackio.id").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        identity(str(tmp_path), "trackio")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("held", ["", "another", "../x-12345678", "a\x1bb-12345678", "x" * 9999])
def test_a_name_that_was_made_up_is_refused(tmp_path: Path, held: str) -> None:
    (tmp_path / "trackio.id").write_text(held)
    with pytest.raises(ValueError, match="does not hold the name of a run"):
        identity(str(tmp_path), "trackio")


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trackio.id")
    with pytest.raises(ValueError, match="does not hold the name of a run"):
        identity(str(tmp_path), "trackio")


def test_no_link_leads_a_tracker_out_of_the_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "wandb").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="leads out of the run's folder"):
        inside(str(out), "wandb")
    assert inside(str(out), "tensorboard") == out / "tensorboard"


@pytest.mark.parametrize("folder", ["../elsewhere", "/tmp/elsewhere", "a/../../b"])
def test_the_folder_of_tensorboard_stays_in_the_run(folder: str) -> None:
    with pytest.raises(PluginError, match="it leaves the run's folder"):
        load(["tensorboard"], {"tensorboard": {"folder": folder}})


def test_what_sends_data_away_is_named_again() -> None:
    (one,) = load(["wandb"], {"wandb": {"mode": "online", "entity": "them", "project": "p"}})
    for named in ((), ("wandb.mode",), ("wandb.entity",)):
        with pytest.raises(Refusal, match="must be named again"):
            check_named_again([one], named.__contains__, Path("out"))
    check_named_again([one], {"wandb.mode", "wandb.entity"}.__contains__, Path("out"))
    check_named_again(load(["wandb"]), lambda key: False, Path("out"))
