"""Tests of the whole job with a bigram model: real settings, plan, text and files, no framework."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm_core.backends.base import Backend
from minillm_core.backends.detect import Detected
from minillm_core.checkpoint.commit import commit
from minillm_core.checkpoint.manifest import verify
from minillm_core.checkpoint.read import newest_or_refuse
from minillm_core.checkpoint.writer import CheckpointWriter, Result
from minillm_core.config.load import load
from minillm_core.errors import (
    DataError,
    Interrupted,
    MinillmError,
    NoCheckpoint,
    NoEvidence,
    NonFinite,
    OutOfMemory,
    PluginCodeError,
    Refusal,
    Stopped,
)
from minillm_core.plan import Plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.plugin import Plugin
from minillm_core.train.errors import resume_line
from minillm_core.train.initial import Branch
from minillm_core.train.metrics import read_events
from minillm_core.train.progress import LineDisplay
from minillm_core.train.request import Prepared, train
from minillm_core.train.run import Run
from minillm_core.train.run_folder import RunFolder

HERE = Detected("torch", "cpu", "the test says so")
SMALL = {
    **{"model.vocab": 300, "model.dim": 16, "model.layers": 2, "model.hidden": 16},
    **{"train.rows": 2, "train.seq_len": 16, "train.lr": 0.5, "eval.tokens": 200},
}
TEXT = "It was a dark and stormy night; the rain fell in torrents. Ünïcode \U0001f600!\n" * 4


class Watcher(Plugin, api=1):
    """Watches, and counts."""

    def on_event(self, event: Any) -> None: ...

    def on_batch(self, batch: dict, phase: str) -> dict:
        return batch


class Sleeper(Plugin, api=1):
    """Raises at every event."""

    def on_event(self, event: Any) -> None:
        raise ValueError("no luck")


class Breaker(Plugin, api=1):
    """Breaks every batch."""

    def on_batch(self, batch: dict) -> dict:
        raise SystemExit(0)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for n in range(30):
        (folder / f"{n:02d}.txt").write_text(f"{n}. {TEXT}", "utf-8")
    return folder


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


class Job:
    """One run, with all its messages."""

    def __init__(self, bigram: type, folder: Path, text: Path, cache: Path) -> None:
        self.bigram, self.text, self.cache = bigram, text, cache
        self.out = folder / "out"
        self.runs = folder / "runs"
        self.said: list[str] = []
        self.trainer: Any = None
        self.trainer_options: dict[str, Any] = {}
        self.prepare: Callable[[Any], None] = lambda trainer: None

    def create(self, detected: Detected, plan: Plan) -> Backend:
        job = self

        class Bigrams(Backend):
            name = "numpy"

            def trainer(self, plan: Plan, seed: int, **more: Any) -> Any:
                job.trainer = job.bigram(vocab=plan.config.model.vocab, **job.trainer_options)
                job.prepare(job.trainer)
                return job.trainer

            model = trainer

        return Bigrams()

    def train(self, *assignments: str, plugins: dict[str, Plugin] | None = None, **options) -> int:
        plugins = plugins or {}
        settings = SMALL | dict(one.split("=") for one in assignments)
        loaded = load(
            preset="tiny",
            plugins=",".join(plugins) or None,
            assignments=[f"{key}={value}" for key, value in settings.items()],
            flags={"--data": [str(self.text)], "--steps": options.pop("steps", 12)},
            default_preset=lambda: ("tiny", "test"),
        )
        given = {"out": self.out, "runs": self.runs, "cache": self.cache, "create": self.create}
        named = tuple(LoadedPlugin.of(name, plugin) for name, plugin in plugins.items())
        return train(
            Prepared(loaded, None, named, HERE),
            say=self.said.append,
            **(given | options),
        )

    def evaluate(self, **options: Any) -> dict[str, Any]:
        lengths = {key: options.pop(key) for key in ("seq_len", "max_tokens") if key in options}
        given = {"cache": self.cache, "say": self.said.append, "create": self.create}
        run = Run.open(self.out, **(given | options))
        found = run.evaluate(str(self.text), **lengths)
        return {**vars(found), "checkpoint": str(run.checkpoint)}

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.out / "run.json").read_text("utf-8"))

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = (self.out / "metrics.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def loaded_of() -> Callable[..., LoadedPlugin]:
    """Return a plugin loaded from a distribution, or from a file."""

    def made(name: str, distribution: str | None, source: str) -> LoadedPlugin:
        return LoadedPlugin(name, distribution, None, source, "", "", "", Watcher())

    return made


@pytest.fixture
def job(bigram, tmp_path: Path, text: Path, shared_cache: Path) -> Job:
    return Job(bigram, tmp_path, text, shared_cache)


def test_a_run_leaves_everything_behind(job: Job) -> None:
    assert job.train("eval.every=5", "checkpoint.every=4") == 0
    assert sorted(path.name for path in job.out.iterdir()) == [
        "checkpoints",
        "metrics.jsonl",
        "run.json",
        "run.toml",
        "tokenizer.json",
    ]
    steps = [event for event in job.events if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 13))
    assert steps[0]["loss"] == pytest.approx(math.log(300))
    assert steps[-1]["tokens"] == 12 * 2 * 16
    evals = [event for event in job.events if event["event"] == "eval"]
    assert [event["step"] for event in evals] == [0, 5, 10, 12]
    assert all(event["bits_per_byte"] > 0 for event in evals)
    assert job.events[0]["event"] == "run"
    assert job.events[0]["plan_hash"] == job.record["plan_hash"]
    assert job.events[-1]["event"] == "end"

    folders = sorted((job.out / "checkpoints").iterdir())
    assert [path.name for path in folders] == ["step-00000004", "step-00000008", "step-00000012"]
    assert all(verify(path) == [] for path in folders)
    found = newest_or_refuse(job.out)
    np.testing.assert_array_equal(found.arrays("model.")["model.table"], job.trainer.table)
    assert found.scalars["tokens"] == 384
    assert found.scalars["cursor"]


def test_the_record_says_what_was_run(job: Job) -> None:
    job.train("eval.every=5", steps=3)
    record = job.record
    assert record["exit"] == 0
    assert record["config"]["train"]["steps"] == {"value": 3, "origin": "--steps"}
    assert record["binding"]["device"] == "cpu"
    assert record["plugins"] == []
    assert len(record["plan_hash"]) == 64
    assert record["plan"]["train"]["steps"] == 3
    assert record["versions"]["minillm-core"]
    assert record["hardware"]["cores"]
    assert record["seed"] == 0


def test_three_lines_before_the_first_step_and_the_rest_for_those_who_ask(job: Job) -> None:
    job.train(plugins={"watcher": Watcher()})
    first, *said = job.said
    assert first == f"torch on cpu, preset tiny, writing to {job.out} (the test says so)"
    start = next(i for i, line in enumerate(said) if line.startswith("step 0: held-out loss "))
    assert [line.partition(": ")[0] for line in said[:start]] == ["data", "model"]
    assert "plugins watcher; 12 steps of 32 tokens, 0.12 epochs" in said[1]
    assert said[start].endswith(": knows nothing yet (ln 300 = 5.70)")

    job.said.clear()
    job.train(plugins={"watcher": Watcher()}, steps=1, out=None, verbose=True)
    assert "plugins watcher; 1 step of 32 tokens" in job.said[2]
    start = [line.partition(": ")[0] for line in job.said[3:9]]
    assert start == ["device", "plugin watcher (a file)", "plan", "export", "kernels", "note"]


def test_to_resume_where_no_run_is_starts_one_and_says_so(job: Job) -> None:
    job.train(steps=1, resume=True)
    assert job.said[1] == f"note: there is no run in {job.out} yet: a new one starts"
    old, job.out = job.out, job.out.with_name("outt")
    job.said.clear()
    job.train(steps=1, resume=True)
    assert job.said[0].startswith(f"torch on cpu, preset tiny, writing to {job.out} ")
    assert job.said[1].endswith(f"{job.out} yet: a new one starts (did you mean {old}?)")
    job.said.clear()
    job.train(steps=1, resume=True)
    assert not any("there is no run" in line for line in job.said)
    assert (
        job.said[-1]
        == f"{job.out} is finished: 1 step is done; --steps with more of them extends it"
    )


def test_a_run_by_the_clock_says_what_is_not_on_it(
    job: Job, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a slow machine may take twice the time in one step
    monkeypatch.setattr("minillm_core.train.request.display", lambda say: LineDisplay(say, clock))
    job.trainer_options = {"clock": clock, "cost": 0.025}
    job.train("train.minutes=0.001", steps=None)
    (line,) = (line for line in job.said if line.startswith("model: "))
    assert "0.001 minutes of training at 32 tokens a step; start and evaluation come on" in line
    (line,) = (line for line in job.said if " --resume " in line)
    assert line.split()[-1] == "train.minutes=0.002"
    step = max(saved(job.out))
    job.train("train.minutes=0.001", steps=None, resume=True)
    assert job.said[-1].endswith("a longer train.minutes extends it")
    job.train("train.minutes=0.002", steps=None, resume=True)
    assert "note: resumed with another train.minutes: 0.001 -> 0.002" in job.said
    assert max(saved(job.out)) > step


def test_the_end_says_how_long_it_took_and_what_can_be_typed_next(job: Job) -> None:
    job.out = job.out.with_name("a run")
    job.train("eval.prompts=-v is", plugins={"watcher": Watcher()})
    end = next(i for i, line in enumerate(job.said) if line.startswith("done in "))
    done, steps, result, files, following, *commands = job.said[end:]
    assert re.fullmatch(
        r"done in \d:\d\d \(training \d:\d\d, preparing \d:\d\d, evaluating \d:\d\d"
        r"(, waiting for checkpoints \d:\d\d)?\)",
        done,
    )
    assert re.fullmatch(r"12 steps, 0.12 epochs, [\d,]+ tokens/s", steps)
    assert result.startswith("held-out loss ")
    assert files == f"in {job.out}: checkpoints/, tokenizer.json, metrics.jsonl, run.json, run.toml"
    assert following == "next:"
    out, named = str(job.out), ["--plugins", f"{Watcher.__module__}:Watcher"]
    assert [shlex.split(line)[1:] for line in commands] == [
        ["generate", out, *named, "--", "-v is"],
        ["report", out],
        ["train", "--resume", "--out", out, "--steps", "24", *named],
        ["export", out, "--to", f"{out}-model", *named],
    ]


def test_without_checkpoints_there_is_only_the_report_to_look_at(job: Job) -> None:
    job.train("checkpoint.every=0", steps=1)
    assert job.said[-2:] == ["next:", f"  minillm report {job.out}"]


def test_without_a_name_the_first_free_folder_is_taken(job: Job) -> None:
    for n in (1, 2):
        job.train(out=None, steps=1)
        assert (job.runs / f"tiny-{n}" / "run.json").exists()
        assert any(line.startswith(f"in {job.runs / f'tiny-{n}'}: ") for line in job.said)


def test_a_folder_that_is_taken_meanwhile_is_said(job: Job) -> None:
    job.prepare = lambda trainer: (job.runs / "tiny-1").mkdir(parents=True)
    job.train(out=None, steps=1)
    one, two = job.runs / "tiny-1", job.runs / "tiny-2"
    assert f"preset tiny, writing to {one}" in job.said[0]
    assert f"another run took {one} in the meantime: writing to {two}" in job.said


def test_a_run_is_evaluated_at_the_start_at_every_sixth_and_at_the_end(job: Job) -> None:
    job.train("eval.share=0.25")
    found = [(e["step"], e["tokens"]) for e in job.events if e["event"] == "eval"]
    # 13 windows of 16 tokens; 3 of them during the run
    assert found == [(step, 48) for step in (0, 2, 4, 6, 8, 10)] + [(12, 200)]

    last = [event["val_loss"] for event in job.events if event["event"] == "eval"][-1]
    job.train("eval.every=0", out=job.out.with_name("other"))
    job.out = job.out.with_name("other")
    (only,) = (event for event in job.events if event["event"] == "eval")
    assert (only["step"], only["val_loss"]) == (12, last)


def test_an_evaluation_without_its_loss_is_passed_over(job: Job) -> None:
    job.train(steps=4)
    with (job.out / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"event": "eval", "step": 4}\n')
    assert job.train(steps=6, resume=True) == 0


def test_evaluations_keep_their_places_and_their_bits_when_a_run_is_resumed(job: Job) -> None:
    def evaluations() -> list[dict[str, Any]]:
        return [event for event in job.events if event["event"] in ("eval", "sample")]

    job.train("eval.share=0.25", "eval.samples=1", "checkpoint.every=3")
    whole, first = evaluations(), job.out
    for stop in (1, 6):
        job.out = first.with_name(f"stopped-{stop}")

        def at(trainer: Any, stop: int = stop) -> None:
            def signalled(step: int) -> None:
                if step == stop:
                    signal.raise_signal(signal.SIGINT)

            trainer.on_step = signalled

        job.prepare = at
        with pytest.raises(Stopped):
            job.train("eval.share=0.25", "eval.samples=1", "checkpoint.every=3")
        job.prepare = lambda trainer: None
        job.train("eval.share=0.25", "eval.samples=1", "checkpoint.every=3", resume=True)
        assert evaluations() == whole


def test_two_beginnings_of_held_out_documents_are_continued_at_the_end(job: Job) -> None:
    job.train("eval.samples=1", "eval.every=6")
    found = [event for event in job.events if event["event"] == "sample"]
    assert [event["step"] for event in found] == [0, 6, 12, 12]
    assert all(set(event) == {"event", "step", "prompt", "text"} for event in found)
    prompts = [event["prompt"] for event in found]
    assert prompts[2] != prompts[3]
    assert all(re.fullmatch(r"\d+\. It was a dark and stormy night;", one) for one in prompts)
    assert any(line.startswith(f"step 12: the model continues {prompts[3]!r}") for line in job.said)
    assert job.events[-1]["event"] == "end"


def test_all_prompts_that_are_given_are_continued(job: Job) -> None:
    job.train("eval.prompts=The rain", steps=1)
    found = [event for event in job.events if event["event"] == "sample"]
    assert [event["prompt"] for event in found] == ["The rain"] * 2
    assert found[0]["text"] != found[1]["text"]


def test_no_samples_where_none_are_wanted(job: Job) -> None:
    job.train("eval.samples=0", steps=1)
    assert "sample" not in {event["event"] for event in job.events}
    job.train(steps=1, out=job.out.with_name("other"))
    job.out = job.out.with_name("other")
    assert [event["event"] for event in job.events].count("sample") == 2


def test_no_checkpoints_when_none_are_wanted(job: Job) -> None:
    job.train("checkpoint.every=0", steps=2)
    assert not (job.out / "checkpoints").exists()
    with pytest.raises(Refusal, match="no checkpoint"):
        job.evaluate()


def test_only_some_are_kept(job: Job) -> None:
    job.train("checkpoint.every=2", "checkpoint.keep=2")
    names = sorted(path.name for path in (job.out / "checkpoints").iterdir())
    assert names == ["step-00000010", "step-00000012"]


def refused(
    job: Job, error: type[MinillmError], *assignments: str, said: int = 0, **options: Any
) -> None:
    before = sorted(job.out.parent.rglob("*"))
    with pytest.raises(error) as caught:
        job.train(*assignments, **options)
    assert caught.value.exit_code == 2
    assert str(caught.value).count("\n") < 12
    assert len(job.said) == said  # the first line precedes reading the data
    job.said.clear()
    assert sorted(job.out.parent.rglob("*")) == before


def test_a_refusal_says_and_writes_nothing(job: Job, tmp_path: Path) -> None:
    refused(job, DataError, "train.seq_len=1000000", said=1)
    file = tmp_path / "file"
    file.write_text("")
    refused(job, Refusal, out=file)
    job.text = tmp_path / "missing"
    refused(job, DataError, said=1)


def test_a_folder_with_a_run_is_refused(job: Job) -> None:
    job.train(steps=1)
    job.said.clear()
    refused(job, Refusal)
    assert job.record["exit"] == 0


def test_plugins_that_take_part_are_recorded(job: Job) -> None:
    job.train(plugins={"watcher": Watcher()})
    (entry,) = job.record["plugins"]
    assert entry["name"] == "watcher"
    assert entry["distribution"] is None
    assert entry["evidence"]["shown"]
    batch, event = entry["evidence"]["what"]
    assert batch.startswith("batch:watcher x")
    assert event.startswith("event:watcher x")


def test_an_observer_learns_the_folder_and_the_settings_which_metrics_do_not_repeat(
    job: Job,
) -> None:
    told: list[Any] = []

    class Listener(Plugin, api=1):
        """Records its events."""

        def on_event(self, event: Any) -> None:
            told.append(event)

    job.train(plugins={"listener": Listener()})
    begun = told[0]
    assert (begun.event, begun.out) == ("run", str(job.out))
    assert begun.settings["log"]["every"] == 1
    assert begun.settings["data"]["paths"] == [str(job.text)]
    assert set(job.events[0]) == {"event", "plan_hash", "steps", "parameters"}


def test_a_plugin_without_evidence_ends_the_run(job: Job) -> None:
    with pytest.raises(
        NoEvidence, match=r"'sleeper' .* raised 3 times and was switched off"
    ) as error:
        job.train(plugins={"sleeper": Sleeper()}, steps=30)
    assert "ValueError: no luck, at " in (error.value.where or "")
    assert "test_run.py:" in (error.value.where or "")
    assert job.record["exit"] == 3
    assert job.record["plugins"][0]["evidence"]["shown"] is False
    assert any("gets no more events" in line for line in job.said)
    assert job.events[-1]["exit"] == 3


def test_a_short_run_warns_of_a_plugin_without_evidence(job: Job) -> None:
    assert job.train(plugins={"sleeper": Sleeper()}, steps=4) == 0
    assert job.record["exit"] == 0
    assert job.record["plugins"][0]["evidence"]["shown"] is False
    (line,) = (line for line in job.said if "plugin 'sleeper' was switched off" in line)
    assert "raised 3 times: ValueError: no luck, at " in line


def test_an_observer_that_is_switched_off_on_the_way_is_recorded(job: Job) -> None:
    class Tired(Plugin, api=1):
        """Raises from step 5 on."""

        def on_event(self, event: Any) -> None:
            if getattr(event, "step", 0) >= 5:
                raise RuntimeError("disk on fire")

    assert job.train(plugins={"tired": Tired(), "watcher": Watcher()}, steps=12) == 0
    records = {one["name"]: one["evidence"] for one in job.record["plugins"]}
    assert records["tired"]["shown"]
    assert records["tired"]["switched_off"].startswith("RuntimeError: disk on fire, at ")
    assert "switched_off" not in records["watcher"]
    warned = [line for line in job.said if "(1 of 3): RuntimeError: disk on fire, at " in line]
    assert len(warned) == 1
    assert any("'tired' was switched off during the run" in line for line in job.said)


def test_a_plugin_that_breaks_a_batch_ends_the_run_under_its_name(job: Job) -> None:
    with pytest.raises(PluginCodeError, match=r"plugin 'breaker' raised in on_batch"):
        job.train(plugins={"breaker": Breaker()})
    assert job.record["exit"] == 3


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (lambda batch: None, "on_batch returned NoneType"),
        (lambda batch: batch | {"ids": batch["ids"] + 10_000}, "model.vocab="),
    ],
)
def test_a_batch_that_cannot_be_used_is_its_plugin_s_fault(
    job: Job, broken: Any, what: str
) -> None:
    class Spoiler(Plugin, api=1):
        """Returns an invalid batch."""

        def on_batch(self, batch, phase):
            return broken(batch)

    with pytest.raises(PluginCodeError, match="'spoiler' broke the batch in on_batch") as error:
        job.train(plugins={"spoiler": Spoiler(), "watcher": Watcher()})
    assert what in str(error.value.where)
    assert job.record["exit"] == 3


def test_a_signal_leaves_a_checkpoint(job: Job) -> None:
    def at_five(trainer: Any) -> None:
        trainer.on_step = lambda step: signal.raise_signal(signal.SIGINT) if step == 5 else None

    job.prepare = at_five
    with pytest.raises(Stopped) as error:
        job.train("checkpoint.every=100")
    assert error.value.fix == f"minillm train --resume --out {job.out} resumes it"
    assert job.record["exit"] == 75
    assert newest_or_refuse(job.out).step == 5

    other = job.out.with_name("other")
    with pytest.raises(Interrupted):
        job.train("checkpoint.every=0", out=other)
    assert json.loads((other / "run.json").read_text())["exit"] == 130


def test_a_run_in_the_current_folder_ends_with_commands_too(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = job.out
    folder.mkdir()
    monkeypatch.chdir(folder)
    job.out = Path()
    job.train(steps=1)
    assert f"  minillm export . --to {folder}-model" in job.said


def test_the_end_says_how_long_training_waited_for_checkpoints(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = CheckpointWriter.wait

    def slow(writer: CheckpointWriter) -> list[Result]:
        time.sleep(1.0)
        return wait(writer)

    monkeypatch.setattr(CheckpointWriter, "wait", slow)
    job.train("checkpoint.every=100", steps=2)
    (line,) = (line for line in job.said if line.startswith("done in "))
    assert re.search(r", waiting for checkpoints 0:0\d\)$", line)


@pytest.mark.parametrize(
    "place",
    ["session.export_checked", "session.describe.start", "session.Feed", "session.describe.end"],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_outside_the_loop_ends_the_run(
    job: Job, monkeypatch: pytest.MonkeyPatch, place: str, number: int
) -> None:
    def at_once(*_arguments: Any, **_options: Any) -> None:
        signal.raise_signal(number)
        raise AssertionError("it went on")

    def later(*_arguments: Any, **_options: Any) -> list[str]:
        signal.raise_signal(number)  # everything is finished and recorded
        return []

    ended = place.endswith("describe.end")
    monkeypatch.setattr(f"minillm_core.train.{place}", later if ended else at_once)
    if ended:
        assert job.train("checkpoint.every=0") == 0
        assert "a sample of what it writes:" not in job.said
        assert job.record["exit"] == 0
        return
    with pytest.raises(Interrupted, match="nothing was saved"):
        job.train()
    assert not (job.out / "lock.json").exists()
    if place.endswith("Feed"):
        assert job.record["exit"] == 130


def test_a_signal_while_data_are_prepared_says_in_what_it_came(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: Any, progress: Any, **_options: Any) -> None:
        progress("tokenising", 1, 9)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("minillm_core.train.job.open_corpus", interrupted)
    with pytest.raises(Interrupted, match="ended by SIGINT while tokenising; nothing was saved"):
        job.train()
    assert not job.out.exists()


def test_a_signal_before_a_run_goes_on_leaves_it_to_be_resumed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.train(steps=4)
    monkeypatch.setattr(
        "minillm_core.train.resume.newest", lambda *_: signal.raise_signal(signal.SIGTERM)
    )
    with pytest.raises(
        Stopped, match="ended by SIGTERM while loading the checkpoint; the checkpoint of step 4"
    ) as error:
        job.train(steps=9, resume=True)
    assert error.value.fix == f"minillm train --resume --out {job.out} resumes it"


def test_what_goes_on_after_a_signal_can_be_typed(loaded_of: Any) -> None:
    plugins = [
        loaded_of("muon", "minillm-muon", "minillm_muon:Muon"),
        loaded_of("trick", None, "./my_trick.py:MyTrick"),
        loaded_of("other", None, "./b.py:B"),
    ]
    line = resume_line(Path("runs/my run"), plugins)
    assert shlex.split(line.removesuffix(" resumes it")) == [
        *("minillm", "train", "--resume", "--out", "runs/my run"),
        *("--plugins", "./my_trick.py:MyTrick,./b.py:B"),
    ]


def test_a_loss_that_is_no_number(job: Job) -> None:
    job.trainer_options = {"losses": dict.fromkeys(range(7, 30), math.nan)}
    with pytest.raises(
        NonFinite, match="10 of the last 100 steps were not finite: the loss of step 16"
    ):
        job.train("checkpoint.every=3", steps=30)
    assert job.record["exit"] == 5
    assert newest_or_refuse(job.out).step == 15


@pytest.mark.parametrize(("steps", "first"), [(1, 1), (4, 1), (9, 1), (5, 2), (5, 3)])
def test_a_short_run_without_half_its_steps_finite_has_failed(
    job: Job, steps: int, first: int
) -> None:
    job.trainer_options = {"losses": dict.fromkeys(range(first, 30), math.nan)}
    bad = steps + 1 - first
    with pytest.raises(NonFinite, match=f"{bad} of {steps} steps were not finite") as error:
        job.train(steps=steps)
    assert "train.lr" in error.value.fix
    assert job.record["exit"] == 5
    kept = job.out / "checkpoints"
    assert first > 1 or not kept.exists() or not list(kept.iterdir())
    assert not any("a sample" in line or "done:" in line for line in job.said)


@pytest.mark.parametrize("error", [OutOfMemory("no room"), MemoryError()])
def test_out_of_memory_says_what_to_set(job: Job, error: BaseException) -> None:
    def full(step: int) -> None:
        raise error

    job.prepare = lambda trainer: setattr(trainer, "on_step", full)
    with pytest.raises(OutOfMemory, match="in step 1") as caught:
        job.train()
    assert "train.rows=1 train.accumulate=2" in str(caught.value)
    assert job.record["exit"] == 6


def test_a_model_that_does_not_even_fit(job: Job) -> None:
    def full(trainer: Any) -> None:
        raise OutOfMemory("no room")

    job.prepare = full
    with pytest.raises(OutOfMemory, match="while the model was built"):
        job.train()
    assert not job.out.exists()


def test_a_defect_is_recorded_as_one(job: Job) -> None:
    def defect(step: int) -> None:
        raise RuntimeError("unforeseen")

    job.prepare = lambda trainer: setattr(trainer, "on_step", defect)
    with pytest.raises(RuntimeError, match="unforeseen"):
        job.train()
    assert job.record["exit"] == 1
    assert job.events[-1]["event"] == "end"


@pytest.mark.parametrize(
    ("writes", "what"),
    [
        (lambda w: {}, "gave nothing as 'weight', not float32"),
        (lambda w: {"weight": w[0]}, "as 'weight', not float32"),
        (lambda w: {"weight": w.astype(np.float64)}, "gave float64"),
        (lambda w: {"weight": np.where(w > 0, np.float32(np.inf), w)}, "gave inf as 'weight' at"),
        (
            lambda w: {"weight": w, "weights": w[..., 0] * np.float32(np.nan)},
            "gave nan as 'weights' at",
        ),
    ],
)
def test_a_field_that_is_not_as_declared_or_not_finite(job: Job, writes: Any, what: str) -> None:
    class Weighing(Plugin, api=1):
        """Writes a field that may be wrong."""

        def build_data(self, data: Any) -> None:
            data.field("weight", "float32", (2,))

        def on_batch(self, batch: dict, phase: str) -> dict:
            return batch | writes(np.ones((*batch["ids"].shape, 2), np.float32))

    said = r"'weighing' broke the batch in on_batch, phase train, at step 1"
    with pytest.raises(PluginCodeError, match=said) as error:
        job.train("eval.every=0", plugins={"weighing": Weighing()})
    assert what in str(error.value.where)


def test_an_evaluation_without_a_label_names_who_took_them(job: Job) -> None:
    class Masks(Plugin, api=1):
        """Leaves nothing to predict in evaluations."""

        def on_batch(self, batch: dict, phase: str) -> dict:
            keep = phase != "eval"
            return batch if keep else {**batch, "labels": np.full_like(batch["labels"], -1)}

    with pytest.raises(DataError, match="every label is -1 after on_batch of 'masks'") as refused:
        job.train(plugins={"masks": Masks()}, steps=3)
    assert str(refused.value.where).startswith("data.val = ")
    assert job.record["exit"] == refused.value.exit_code
    assert not any("nan" in line for line in job.said)


def test_a_sample_that_a_plugin_spoils_spoils_no_run(job: Job) -> None:
    class Trainer(Plugin, api=1):
        """Fails outside of training."""

        def on_batch(self, batch: dict, phase: str) -> dict:
            if phase == "decode":
                raise ValueError("what is that")
            return batch

    assert job.train(plugins={"trainer": Trainer()}, steps=2) == 0
    assert job.record["exit"] == 0
    assert any("warning: no sample: plugin 'trainer'" in line for line in job.said)


def test_a_sample_may_be_cut_short(job: Job) -> None:
    def interrupt(ids: np.ndarray) -> np.ndarray:
        raise KeyboardInterrupt

    job.prepare = lambda trainer: setattr(trainer, "next_logits", interrupt)
    assert job.train(steps=1) == 0
    assert job.record["exit"] == 0


def test_eval_finds_what_the_run_found(job: Job, tmp_path: Path) -> None:
    job.train()
    trained = job.trainer.table
    result = job.evaluate()
    np.testing.assert_array_equal(job.trainer.table, trained)
    assert result["step"] == 12
    assert result["tokens"] > 200
    assert result["val_loss"] < math.log(300)
    assert 0 < result["bits_per_byte"] < 8

    few = job.evaluate(max_tokens=100, seq_len=10)
    assert few["tokens"] == 100


def test_eval_pads_no_window_far_beyond_the_text(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.train()
    shapes = list[tuple[int, ...]]()
    evaluate = type(job.trainer).evaluate

    def watched(trainer: Any, batches: Iterable[Any]) -> Any:
        held = list(batches)
        shapes.extend(one["ids"].shape for one in held)
        return evaluate(trainer, held)

    monkeypatch.setattr(type(job.trainer), "evaluate", watched)
    shown = "fit into one window of 1,000,000"
    found = job.evaluate(seq_len=1_000_000)
    assert any(line.startswith("note: all ") and line.endswith(shown) for line in job.said)
    ((rows, width),) = shapes
    assert rows == 1
    assert found["tokens"] < width <= found["tokens"] + 1 + int(SMALL["train.seq_len"])
    said = len(job.said)
    again = job.evaluate(seq_len=width)
    assert not any("fit into one window" in line for line in job.said[said:])
    assert shapes[1][1] == width
    assert again["val_loss"] == pytest.approx(found["val_loss"], rel=1e-6)
    few = job.evaluate(seq_len=1_000_000, max_tokens=5)
    assert few["tokens"] == 5
    assert shapes[2] == (1, int(SMALL["train.seq_len"])), (
        "only the positions that max_tokens needs are computed"
    )


def test_eval_uses_the_newest_that_verifies_and_says_so(job: Job) -> None:
    job.train("checkpoint.every=6")
    (job.out / "checkpoints" / "step-00000012" / "state.json").write_text("{}")
    assert job.evaluate()["step"] == 6
    assert any("step-00000012 does not verify" in line for line in job.said)
    (job.out / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    with pytest.raises(NoCheckpoint):
        job.evaluate()


def test_eval_does_not_run_code_that_a_folder_names(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.train(plugins={"watcher": Watcher()})
    with pytest.raises(Refusal, match="'watcher' must be named again: it is a single file"):
        job.evaluate()
    record = job.record
    record["plugins"][0]["distribution"] = "minillm-watcher"
    (job.out / "run.json").write_text(json.dumps(record))
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(Refusal, match="another account owns"):
        job.evaluate()


def test_eval_takes_a_single_file_that_is_named_again(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "watcher.py"
    file.write_text(
        "from minillm_core.plugins.plugin import Plugin\n"
        "class Again(Plugin, api=1):\n"
        "    def on_batch(self, batch):\n"
        "        return batch\n"
    )
    job.train(plugins={"watcher": Watcher()})
    assert job.evaluate(plugins=f"{file}:Again")["step"] == 12
    assert any("trained with other code of watcher" in line for line in job.said)


def test_eval_refuses_a_plugin_that_the_run_does_not_have(job: Job) -> None:
    job.train()
    with pytest.raises(Refusal, match="was not trained with a plugin 'muon'") as refused:
        job.evaluate(plugins="muon")
    assert refused.value.fix == "its plugins are: none"


def test_eval_refuses_what_is_no_run(job: Job) -> None:
    with pytest.raises(Refusal, match="holds no run"):
        job.evaluate()


def test_eval_refuses_a_checkpoint_of_another_model(job: Job) -> None:
    job.train()

    def refuse(arrays: Any) -> None:
        raise ValueError("model.table is (300, 300), not (8, 8)")

    job.prepare = lambda trainer: setattr(trainer, "load", refuse)
    with pytest.raises(Refusal, match="does not fit the model"):
        job.evaluate()


# The files of a run, changed during it


def change_record(job: Job, change: Callable[[dict[str, Any]], None]) -> None:
    record = job.record
    change(record)
    (job.out / "run.json").write_text(json.dumps(record))


def set_to(section: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record["config"][section][key].update(value=value)


def other_ids(text: str) -> str:
    """Swap two entries of a vocabulary: the file looks the same."""
    document = json.loads(text)
    vocab = document["model"]["vocab"]
    one, other = list(vocab)[40:42]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    return json.dumps(document)


def test_the_tokenizer_is_known_by_its_digest(job: Job) -> None:
    job.train()
    path = job.out / "tokenizer.json"
    text = path.read_text("utf-8")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert job.record["tokenizer"] == {"sha256": digest}
    assert newest_or_refuse(job.out).scalars["tokenizer"] == digest
    loss = job.evaluate()["val_loss"]

    path.write_text(other_ids(text), "utf-8")
    with pytest.raises(Refusal, match=r"tokenizer\.json is not the one") as refused:
        job.evaluate()
    assert str(path) in str(refused.value)
    path.unlink()
    with pytest.raises(Refusal, match=r"tokenizer\.json is missing"):
        job.evaluate()

    for broken in (None, other_ids(text)):  # a resume takes it from the data, whose ids are equal
        if broken is not None:
            path.write_text(broken, "utf-8")
        job.said.clear()
        job.train(resume=True, steps=job.record["config"]["train"]["steps"]["value"] + 4)
        assert any("tokenizer.json of the run was" in line for line in job.said)
        assert path.read_text("utf-8") == text
    assert job.evaluate()["val_loss"] < loss


def test_a_tokenizer_of_no_run_is_kept(job: Job) -> None:
    path = job.out / "tokenizer.json"
    job.out.mkdir()
    path.write_text("mine")
    with pytest.raises(
        Refusal, match=r"tokenizer\.json is not the tokenizer of this run"
    ) as refused:
        job.train()
    assert path.read_text() == "mine"
    assert refused.value.fix

    path.unlink()
    job.train()
    (job.out / "run.json").unlink()  # as after a kill before it was written
    job.train()


def test_a_tokenizer_that_was_given_is_compared_as_well(job: Job, tmp_path: Path) -> None:
    job.train()
    own = tmp_path / "own.json"
    own.write_bytes((job.out / "tokenizer.json").read_bytes())
    record = job.record
    layer = RunFolder(job.out, record).layer()
    assert "data.tokenizer" not in layer.settings
    record["config"]["data"]["tokenizer"]["value"] = str(own)
    (job.out / "tokenizer.json").write_text(other_ids(own.read_text("utf-8")), "utf-8")
    with pytest.raises(Refusal, match=r"tokenizer\.json is not the one"):
        RunFolder(job.out, record).layer()


def test_a_run_of_an_older_version_is_read_with_a_word(job: Job) -> None:
    job.train()
    change_record(job, lambda record: record.pop("tokenizer"))
    path = newest_or_refuse(job.out).path
    arrays, scalars = newest_or_refuse(job.out).arrays(), newest_or_refuse(job.out).scalars
    scalars.pop("tokenizer")
    commit(job.out, 12, arrays, scalars)
    assert path.is_dir()
    job.said.clear()
    assert job.evaluate()["step"] == 12
    assert any("kept no digest" in line for line in job.said)


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("model", "tied", False, r"model\.tied: true -> false"),
        ("model", "rope_base", 500_000.0, r"model\.rope_base: 10000\.0 -> 500000\.0"),
        ("train", "seq_len", 8, r"train\.seq_len: 16 -> 8"),
    ],
)
def test_settings_that_were_changed_are_named(
    job: Job, section: str, key: str, value: Any, said: str
) -> None:
    job.train("model.tied=true")
    change_record(job, set_to(section, key, value))
    with pytest.raises(Refusal, match=f"was changed.*{said}") as refused:
        job.evaluate()
    assert "run.json" in str(refused.value)


def test_what_only_training_needs_may_differ_with_a_word(job: Job) -> None:
    job.train()
    loss = job.evaluate()["val_loss"]
    change_record(job, set_to("train", "lr", 0.25))
    job.said.clear()
    assert job.evaluate()["val_loss"] == loss
    (note,) = [line for line in job.said if line.startswith("note: trained with")]
    assert "plan" not in note


def test_a_seed_that_was_changed_is_refused(job: Job) -> None:
    job.train()
    change_record(job, lambda record: record["config"]["seed"].update(value=5))
    for read in (job.evaluate, lambda: job.train("seed=5", resume=True, steps=16)):
        with pytest.raises(Refusal, match="its seed is 5, and the run was trained with 0"):
            read()


def test_a_resume_says_what_it_computes_with_now(job: Job) -> None:
    job.train()

    def older(record: dict[str, Any]) -> None:
        record["versions"].update(torch="1.0.7", numpy="1.0", python="3.0.7")
        record["hardware"].update(device="another CPU")

    change_record(job, older)
    job.said.clear()
    job.train(resume=True, steps=16)
    (line,) = [line for line in job.said if "3.0.7 then" in line]
    assert "numpy 1.0 then" in line
    assert "device another CPU then, a CPU now" in line
    (life,) = job.record["resumed"]
    assert life["versions_before"]["python"] == "3.0.7"
    assert life["hardware_before"]["device"] == "another CPU"
    assert job.record["versions"]["python"] != "3.0.7"


@pytest.mark.parametrize("what", ["deleted", "moved", "replaced", "metrics", "lock", "copied"])
@pytest.mark.parametrize("every", ["4", "0"])
def test_a_folder_that_is_no_longer_there_ends_the_run(
    job: Job, tmp_path: Path, what: str, every: str
) -> None:
    out = job.out

    def attack(step: int) -> None:
        if step != 6:
            return
        while every == "4" and not (out / "checkpoints" / "step-00000004").exists():
            time.sleep(0.01)  # it is written in the background
        match what:
            case "deleted":
                shutil.rmtree(out)
            case "moved":
                out.rename(tmp_path / "elsewhere")
            case "replaced":
                out.rename(tmp_path / "elsewhere")
                out.mkdir()
                (out / "run.json").write_text("mine")
            case "copied":
                out.rename(tmp_path / "elsewhere")
                shutil.copytree(tmp_path / "elsewhere", out)
            case "metrics":
                (out / "metrics.jsonl").unlink()
            case "lock":
                (out / "lock.json").unlink()

    job.prepare = lambda trainer: setattr(trainer, "on_step", attack)
    with pytest.raises(MinillmError, match="while this run was training") as error:
        job.train(f"checkpoint.every={every}")
    assert error.value.exit_code == 1
    assert str(out) in str(error.value)
    if what in ("deleted", "moved"):
        assert not out.exists()
    if what == "replaced":
        assert [path.name for path in out.iterdir()] == ["run.json"]
        assert (out / "run.json").read_text() == "mine"
    if what == "copied":
        assert job.record["exit"] is None  # it belongs to another folder


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("kind", ["file", "link", "loop"])
def test_checkpoints_that_are_no_folder_of_the_run_are_refused_at_once(
    job: Job, tmp_path: Path, kind: str, resume: bool
) -> None:
    if resume:
        job.train()
        shutil.rmtree(job.out / "checkpoints")
    job.out.mkdir(exist_ok=True)
    other = tmp_path / "other" / "checkpoints"
    (other / "step-00000010.tmp-ff").mkdir(parents=True)
    path = job.out / "checkpoints"
    {
        "file": path.touch,
        "link": lambda: path.symlink_to(other),
        "loop": lambda: path.symlink_to(path),
    }[kind]()
    before = sorted(job.out.iterdir())
    with pytest.raises(Refusal, match="checkpoints is a") as refused:
        job.train(resume=resume, steps=16)
    assert sorted(job.out.iterdir()) == before
    assert [each.name for each in other.iterdir()] == ["step-00000010.tmp-ff"]
    assert refused.value.fix


@pytest.mark.broad(4)
@pytest.mark.parametrize("name", ["metrics.jsonl", "tokenizer.json", "run.json"])
@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "device", "hole"])
def test_files_that_are_none_are_refused_in_bounded_time(
    job: Job, tmp_path: Path, name: str, kind: str
) -> None:
    job.train()
    path = job.out / name
    target = path.rename(tmp_path / "target")
    before = target.read_bytes()
    match kind:
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(target)
        case "device":
            path.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(path)
        case "hole":
            with path.open("wb") as file:
                file.truncate(10 << 30)
    readers = [lambda: job.train(resume=True, steps=16)]
    readers += [job.evaluate] if name != "metrics.jsonl" else [lambda: list(read_events(job.out))]
    for read in readers:
        with pytest.raises(Refusal) as refused:
            read()
        assert name in str(refused.value)
    assert target.read_bytes() == before


@pytest.mark.parametrize("name", ["tokenizer.json", "run.json"])
def test_a_disk_that_is_full_before_the_first_checkpoint(
    job: Job, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = Path.replace

    def full(path: Path, target: Path) -> Path:
        if Path(target).name == name and Path(target).parent == job.out:
            raise OSError(28, "No space left on device")
        return real(path, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(MinillmError, match=rf"{name} could not be written: No space") as error:
        job.train()
    assert error.value.exit_code == 1
    assert error.value.fix


def best_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "checkpoints" / "best.json").read_text())


def saved(out: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in out.glob("checkpoints/step-*"))


def test_a_resume_keeps_what_a_rewind_needs(job: Job) -> None:
    given = ("checkpoint.every=1", "checkpoint.keep=1", "train.spike=9", "train.rewind=4")
    job.train(*given)
    before = saved(job.out)
    assert before[0] <= 12 - 4
    job.train(*given, steps=13, resume=True)
    assert before[0] in saved(job.out)


def evaluating(monkeypatch: pytest.MonkeyPatch, losses: dict[int, float]) -> None:
    """Make evaluations return these losses."""
    from minillm_core.train import session
    from minillm_core.train.events import Evaluated

    monkeypatch.setattr(
        session,
        "validation",
        lambda *_, **__: lambda step: Evaluated(step, losses.get(step, 9.0), None),
    )


def test_the_best_checkpoint_is_kept_and_can_be_chosen(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ("checkpoint.best=true", "checkpoint.keep=1", "checkpoint.every=6", "eval.every=2")
    evaluating(monkeypatch, {2: 5.0, 4: 3.0, 6: math.nan, 8: 4.0, 10: 3.5})
    job.train(*kept)
    assert best_of(job.out) == {"step": 4, "val_loss": 3.0}
    assert saved(job.out) == [4, 12]
    assert job.evaluate(best=True)["step"] == 4
    assert job.evaluate(step=4)["step"] == 4
    assert job.evaluate()["step"] == 12

    # a resumed run keeps the best checkpoint of its earlier starts, and deletes it for a better one
    evaluating(monkeypatch, {14: 2.9, 16: 2.8})
    job.train(*kept, steps=18, resume=True)
    assert best_of(job.out) == {"step": 16, "val_loss": 2.8}
    assert saved(job.out) == [16, 18]


def test_a_best_that_was_not_marked_before_a_kill_is_marked_by_the_next_process(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ("checkpoint.best=true", "checkpoint.every=4", "eval.every=4")
    evaluating(monkeypatch, {4: 3.0})
    job.train(*kept)
    (job.out / "checkpoints" / "best.json").unlink()
    job.train(*kept, steps=13, resume=True)
    assert best_of(job.out) == {"step": 4, "val_loss": 3.0}


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(job: Job) -> None:
    job.train("checkpoint.every=6")
    with pytest.raises(Refusal, match="no checkpoint of step 7") as refused:
        job.evaluate(step=7)
    assert refused.value.fix == "one of the steps 12, 6: --step 12"
    for weights_only, flag in ((False, "--branch"), (True, "--init")):
        with pytest.raises(Refusal, match="no checkpoint of step 7") as branched:
            Branch.of(f"{job.out}@7", job.said.append, weights_only=weights_only)
        assert branched.value.fix == f"one of the steps 12, 6: {flag} {job.out}@12"
    with pytest.raises(Refusal, match="marked no checkpoint as its best") as refused:
        job.evaluate(best=True)
    assert refused.value.fix.startswith("train with checkpoint.best=true; or one of the steps 12")
    with pytest.raises(Refusal, match="step and best are both given"):
        job.evaluate(step=6, best=True)
    (job.out / "checkpoints" / "step-00000006" / "state.json").write_text("{}")
    with pytest.raises(NoCheckpoint, match="step 6 does not verify") as bad:
        job.evaluate(step=6)
    assert bad.value.fix == "one of the steps 12: --step 12"


@pytest.mark.parametrize("marker", ["{", '{"step": "4"}', '{"step": 999999, "val_loss": 1}'])
def test_a_marker_that_says_nothing_names_no_checkpoint(job: Job, marker: str) -> None:
    job.train("checkpoint.every=6")
    (job.out / "checkpoints" / "best.json").write_text(marker)
    with pytest.raises(Refusal, match="marked no checkpoint"):
        job.evaluate(best=True)
    assert job.train(steps=13, resume=True) == 0


def test_a_default_run_saves_on_its_way(job: Job) -> None:
    job.train(steps=40)
    found = [event["step"] for event in job.events if event["event"] == "save"]
    assert len(found) >= 9
    assert max(b - a for a, b in zip([0, *found], found, strict=False)) <= 4
