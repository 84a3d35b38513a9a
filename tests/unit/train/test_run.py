"""The whole job with a model of one table: real settings, plan, text and files, no framework."""

from __future__ import annotations

import json
import math
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm_core.backends.base import Backend
from minillm_core.backends.detect import Detected
from minillm_core.checkpoint import newest_or_refuse, verify
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
from minillm_core.plugins.origin import Origin
from minillm_core.plugins.plugin import Plugin
from minillm_core.train.ending import resume_line
from minillm_core.train.evaluate import evaluate_run
from minillm_core.train.run import train

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
    """Is told nothing, since it raises every time."""

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
    """One run, with everything that it said."""

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

            def trainer(self, plan: Plan, seed: int, *, max_positions: int | None = None) -> Any:
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
        return train(
            loaded,
            [LoadedPlugin.of(name, plugin) for name, plugin in plugins.items()],
            HERE,
            say=self.said.append,
            **(given | options),
        )

    def evaluate(self, **options: Any) -> dict[str, Any]:
        given = {"cache": self.cache, "say": self.said.append, "create": self.create}
        return evaluate_run(self.out, str(self.text), **(given | options))

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.out / "run.json").read_text("utf-8"))

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = (self.out / "metrics.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def loaded_of() -> Callable[..., LoadedPlugin]:
    """A plugin of a distribution, or of a file."""

    def made(name: str, distribution: str | None, source: str) -> LoadedPlugin:
        origin = Origin(name, distribution, None, source, "", "", "")
        return LoadedPlugin(Watcher(), origin)

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
        "tokenizer.json",
    ]
    steps = [event for event in job.events if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 13))
    assert steps[0]["loss"] == pytest.approx(math.log(300))
    assert steps[-1]["tokens"] == 12 * 2 * 16
    evals = [event for event in job.events if event["event"] == "eval"]
    assert [event["step"] for event in evals] == [5, 10, 12]
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


def test_the_first_line_says_where_it_runs_and_the_last_ones_what_it_writes(job: Job) -> None:
    job.train()
    assert job.said[0] == "numpy on cpu (a CPU): the test says so"
    assert any(line.startswith("data: ") for line in job.said)
    assert any("validation loss" in line for line in job.said)
    assert f"{job.out}: checkpoints/, tokenizer.json, metrics.jsonl, run.json" in job.said
    assert job.said[-1].startswith("  | ")


def test_plugins_are_named_before_everything_that_is_noted(job: Job) -> None:
    job.train(plugins={"watcher": Watcher()}, steps=1)
    assert job.said[1] == "plugin watcher (a file)"
    assert not any(line.startswith("note: ") for line in job.said[:2])


def test_without_a_name_the_first_free_folder_is_taken(job: Job) -> None:
    for n in (1, 2):
        job.train(out=None, steps=1)
        assert (job.runs / f"tiny-{n}" / "run.json").exists()
        assert any(line.startswith(f"{job.runs / f'tiny-{n}'}: ") for line in job.said)


def test_no_checkpoints_when_none_are_wanted(job: Job) -> None:
    job.train("checkpoint.every=0", steps=2)
    assert not (job.out / "checkpoints").exists()
    with pytest.raises(Refusal, match="no checkpoint"):
        job.evaluate()


def test_only_some_are_kept(job: Job) -> None:
    job.train("checkpoint.every=2", "checkpoint.keep=2")
    names = sorted(path.name for path in (job.out / "checkpoints").iterdir())
    assert names == ["step-00000010", "step-00000012"]


def refused(job: Job, error: type[MinillmError], *assignments: str, **options: Any) -> None:
    before = sorted(job.out.parent.rglob("*"))
    with pytest.raises(error) as caught:
        job.train(*assignments, **options)
    assert caught.value.exit_code == 2
    assert str(caught.value).count("\n") < 12
    assert job.said == []
    assert sorted(job.out.parent.rglob("*")) == before


def test_a_refusal_says_and_writes_nothing(job: Job, tmp_path: Path) -> None:
    refused(job, DataError, "train.seq_len=1000000")
    file = tmp_path / "file"
    file.write_text("")
    refused(job, Refusal, out=file)
    job.text = tmp_path / "missing"
    refused(job, DataError)


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
        """Keeps what it hears."""

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
    assert any("told no more events" in line for line in job.said)
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
    assert any("'tired' was switched off on the way" in line for line in job.said)


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
        """Returns what is no batch."""

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
    assert error.value.fix == f"minillm train --resume --out {job.out} goes on from it"
    assert job.record["exit"] == 75
    assert newest_or_refuse(job.out).step == 5

    other = job.out.with_name("other")
    with pytest.raises(Interrupted):
        job.train("checkpoint.every=0", out=other)
    assert json.loads((other / "run.json").read_text())["exit"] == 130


@pytest.mark.parametrize(
    "place", ["run.check", "session.describe.start", "session.Feed", "session.describe.end"]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_outside_the_loop_ends_the_run(
    job: Job, monkeypatch: pytest.MonkeyPatch, place: str, number: int
) -> None:
    def at_once(*_arguments: Any, **_options: Any) -> None:
        signal.raise_signal(number)
        raise AssertionError("it went on")

    def later(*_arguments: Any, **_options: Any) -> list[str]:
        signal.raise_signal(number)  # all is done and recorded
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


def test_a_signal_before_a_run_goes_on_leaves_it_to_be_resumed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.train(steps=4)
    monkeypatch.setattr(
        "minillm_core.train.session.go_on", lambda *_: signal.raise_signal(signal.SIGTERM)
    )
    with pytest.raises(Stopped, match="ended by SIGTERM; the checkpoint of step 4") as error:
        job.train(steps=9, resume=True)
    assert error.value.fix == f"minillm train --resume --out {job.out} goes on from it"


def test_what_goes_on_after_a_signal_can_be_typed(loaded_of: Any) -> None:
    plugins = [
        loaded_of("muon", "minillm-muon", "minillm_muon:Muon"),
        loaded_of("trick", None, "./my_trick.py:MyTrick"),
        loaded_of("other", None, "./b.py:B"),
    ]
    line = resume_line(Path("runs/my run"), plugins)
    assert shlex.split(line.removesuffix(" goes on from it")) == [
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


@pytest.mark.parametrize("steps", [1, 4, 9])
def test_a_short_run_without_one_finite_step_has_failed(job: Job, steps: int) -> None:
    job.trainer_options = {"losses": dict.fromkeys(range(1, 30), math.nan)}
    with pytest.raises(NonFinite, match=f"none of the {steps} steps was finite") as error:
        job.train(steps=steps)
    assert error.value.fix == "in a new run: lower train.lr, or lengthen train.warmup"
    assert job.record["exit"] == 5
    assert not (job.out / "checkpoints").exists() or not list((job.out / "checkpoints").iterdir())
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
    with pytest.raises(OutOfMemory, match="in step 0"):
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
        (lambda w: {"weight": w, "weights": w * np.float32(np.nan)}, "gave nan as 'weights' at"),
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
        job.train(plugins={"weighing": Weighing()})
    assert what in str(error.value.where)


def test_a_sample_that_a_plugin_spoils_spoils_no_run(job: Job) -> None:
    class Trainer(Plugin, api=1):
        """Knows how to train."""

        def on_batch(self, batch: dict, phase: str) -> dict:
            if phase == "decode":
                raise ValueError("what is that")
            return batch

    assert job.train(plugins={"trainer": Trainer()}, steps=2) == 0
    assert job.record["exit"] == 0
    assert any("no sample of what it writes: plugin 'trainer'" in line for line in job.said)


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
    assert job.evaluate(plugins={"watcher": f"{file}:Again"})["step"] == 12
    assert any("another plan" in line for line in job.said)


def test_eval_refuses_a_plugin_that_the_run_does_not_have(job: Job) -> None:
    job.train()
    with pytest.raises(Refusal, match="was not trained with a plugin 'muon'") as refused:
        job.evaluate(plugins={"muon": "muon"})
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
