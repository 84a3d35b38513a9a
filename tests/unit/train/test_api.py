"""Tests of the Python API with a bigram model: load, build_plan, Run, in memory and in a folder."""

from __future__ import annotations

import contextvars
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minillm_core as minillm
from minillm_core.backends.base import Backend
from minillm_core.checkpoint.manifest import verify
from minillm_core.plan import Plan
from minillm_core.studies import Detected, Shared, read_corpus
from minillm_core.train.progress import LineDisplay

SIZES = {
    **{"model.vocab": 300, "model.dim": 16, "model.layers": 2, "model.hidden": 16},
    **{"train.rows": 2, "train.seq_len": 16, "train.lr": 0.5, "train.steps": 12},
    **{"eval.tokens": 200, "backend": "torch", "device": "cpu"},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for n in range(30):
        (folder / f"{n:02d}.txt").write_text(f"{n}. It was a dark and stormy night; " * 9)
    return folder


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def settings(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    return {"data.paths": [str(text)], **SIZES}


@pytest.fixture
def options(bigram: type, kept: Path) -> dict[str, Any]:
    """Replace models by tables, and use a separate cache."""

    class Tables(Backend):
        def trainer(self, plan: Plan, seed: int, **more: Any) -> Any:
            return bigram(vocab=plan.config.model.vocab)

        model = trainer

    return {"create": lambda detected, plan: Tables(), "cache": kept}


@pytest.fixture
def make(settings: dict[str, Any], options: dict[str, Any]) -> Callable[..., minillm.Run]:
    def made(out: str | None = None, **more: Any) -> minillm.Run:
        config = minillm.load("tiny", settings=settings | more)
        return minillm.Run(minillm.build_plan(config), out=out, **options)

    return made


def test_a_run_is_closed_in_another_context_than_it_was_begun_in(
    make: Callable[..., minillm.Run],
) -> None:
    steps = make("moved").steps()
    while contextvars.copy_context().run(next, steps, None) is not None:
        pass
    assert json.loads(Path("moved/run.json").read_text())["exit"] == 0


def steps_of(run: minillm.Run, until: int | None = None) -> list[int]:
    found = []
    for event in run.steps():
        if isinstance(event, minillm.Stepped):
            found.append(event.step)
            if event.step == until:
                break
    return found


def test_settings_say_where_they_come_from(settings: dict[str, Any]) -> None:
    config = minillm.load("tiny", plugins=["muon"], settings=settings | {"muon.momentum": 0.9})
    assert (config.train.steps, config.model.dim, config.preset, config.seed) == (12, 16, "tiny", 0)
    assert config.plugins == {"muon": {"momentum": 0.9}}
    assert config.origins["train.steps"] == config.origins["muon.momentum"] == "Python"
    assert config.origins["train.warmup"] != "Python"
    nested = {"train": {"steps": 7}, "model.vocab": 300}
    assert minillm.load("tiny", settings=nested).train.steps == 7


def test_settings_may_be_numpy_s_and_paths(text: Path) -> None:
    found = minillm.load(
        "tiny",
        settings={
            "data.paths": [text],
            "train.steps": np.int64(7),
            "model.tied": np.True_,
            "train.betas": np.array([0.5, 0.25]),
        },
    )
    assert found.data.paths == (str(text),)
    assert (found.train.steps, found.model.tied, found.train.betas) == (7, True, (0.5, 0.25))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"train.stepz": 3}, "train.steps"),
        ({"train.steps": -3}, "train.steps"),
        ({"data.val": float("nan")}, "data.val"),
        ({"plugins.muon": {}}, "plugins are named beside them"),
        ({"train.lr": 0.1, "train": {"lr": 0.2}}, "train.lr is given twice"),
        ({3: 4}, "keys with values"),
        (["train.steps=3"], "keys with values"),
        ("train.steps=3", "there is no setting 'train.steps=3'"),
        ({"muon.momentum": 0.9}, "muon"),
    ],
)
def test_a_wrong_setting_is_refused(wrong: Any, says: str) -> None:
    with pytest.raises(minillm.ConfigError, match=says):
        minillm.load("tiny", settings=wrong)


def test_a_preset_may_be_any_name() -> None:
    with pytest.raises(minillm.ConfigError, match="there is no preset 'mine'"):
        minillm.load(Path("mine"))  # type: ignore[arg-type]


@pytest.mark.parametrize("nothing", [[], (), ""])
def test_an_empty_list_of_data_is_not_the_default_text(nothing: Any) -> None:
    with pytest.raises(minillm.DataError, match=r"is empty|no file is named"):
        minillm.load("tiny", data=nothing)


def test_a_plan_is_the_table_of_the_command(settings: dict[str, Any]) -> None:
    plan = minillm.build_plan(minillm.load("tiny", plugins="muon", settings=settings))
    assert [one.name for one in plan.active] == ["muon"]
    assert "muon" in str(plan)
    assert max(map(len, str(plan).splitlines())) <= 100
    assert plan._repr_html_().startswith("<pre>")
    with pytest.raises(minillm.PlanError, match="does not hold the settings") as refused:
        minillm.Run(minillm.build_plan(plan.config, ()))
    assert "minillm_core.load" in str(refused.value.fix)


def test_a_plan_with_other_settings_of_training_is_run_by_them(settings: dict[str, Any]) -> None:
    plan = minillm.build_plan(minillm.load("tiny", settings=settings)).with_train(steps=3)
    run = minillm.Run(plan)
    assert run.plan.hash == plan.hash
    assert steps_of(run) == [1, 2, 3]


def test_a_run_in_memory_writes_nothing(make: Callable[..., minillm.Run], tmp_path: Path) -> None:
    run = make()
    events = list(run.steps())
    kinds = [type(event).__name__ for event in events]
    assert (kinds[0], kinds[-1]) == ("Started", "Ended")
    assert kinds.count("Stepped") == 12
    assert "Saved" not in kinds
    assert run.step == 12
    assert list(run.steps()) == []  # it has ended
    assert list(tmp_path.iterdir()) == []
    assert run.checkpoint is None
    with pytest.raises(minillm.Refusal, match="in memory"):
        run.save()


def test_leaving_the_loop_keeps_the_run_where_it_is(make: Callable[..., minillm.Run]) -> None:
    whole, left = make(), make()
    losses = [e.loss for e in whole.steps() if isinstance(e, minillm.Stepped)]
    found: list[float] = []
    for until in (3, 4, 9, None):
        for event in left.steps():
            if isinstance(event, minillm.Stepped):
                found.append(event.loss)
                if event.step == until:
                    break
        assert left.step == (until or 12)
        assert left.evaluate(str(left.plan.config.data.paths[0]), max_tokens=50).step == left.step
    assert found == losses


def test_a_run_in_a_folder_is_saved_closed_and_resumed(
    make: Callable[..., minillm.Run], options: dict[str, Any]
) -> None:
    whole = make("whole").train()
    run = make("cut")
    assert steps_of(run, until=5) == [1, 2, 3, 4, 5]
    assert run.save() == run.save() == Path("cut/checkpoints/step-00000005")
    assert not verify(Path("cut/checkpoints/step-00000005"))
    with pytest.raises(minillm.Refusal, match="cut is in use by process") as refused:
        minillm.Run.open("cut", **options).train()
    assert refused.value.fix == "close() the Run that trains there in this process"
    run.close()
    assert json.loads(Path("cut/run.json").read_text())["exit"] == 75
    again = minillm.Run.open("cut", **options)
    assert again.step == 5
    assert steps_of(again) == [6, 7, 8, 9, 10, 11, 12]
    assert json.loads(Path("cut/run.json").read_text())["exit"] == 0
    ends = [one._reader().table for one in (whole, again)]  # type: ignore[attr-defined]
    assert np.array_equal(*ends)
    assert steps_of(minillm.Run.open("cut", **options)) == []
    longer = minillm.Run.open("cut", settings={"train.steps": 14}, **options)
    assert steps_of(longer) == [13, 14]


def test_a_run_whose_preset_the_machine_chose_is_resumed(
    settings: dict[str, Any], options: dict[str, Any]
) -> None:
    config = minillm.load(settings=settings)  # a new run's first note explains this preset
    assert config.origins["preset"] == "device"
    minillm.Run(minillm.build_plan(config), out="here", **options).train()
    longer = minillm.Run.open("here", settings={"train.steps": 14}, **options)
    assert steps_of(longer) == [13, 14]


def test_a_folder_with_a_run_is_refused_at_once(make: Callable[..., minillm.Run]) -> None:
    make("a").train()
    with pytest.raises(minillm.Refusal, match="holds a run already"):
        make("a")
    with pytest.raises(minillm.Refusal, match="holds no run"):
        minillm.Run.open("b")


def test_an_error_between_two_events_ends_the_run(make: Callable[..., minillm.Run]) -> None:
    def fail() -> None:
        with make("a") as run:
            assert steps_of(run, until=3) == [1, 2, 3]
            run.save()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    record = json.loads(Path("a/run.json").read_text())
    assert (record["exit"], record["ended"] is not None) == (75, True)
    assert not Path("a/lock.json").exists()


@pytest.mark.parametrize("saved", [True, False])
def test_a_run_that_was_ended_does_not_go_on(make: Callable[..., minillm.Run], saved: bool) -> None:
    run = make("a", **{"checkpoint.every": 3 if saved else 100})
    assert steps_of(run, until=3) == [1, 2, 3]
    run.close()
    again: list[Callable[[], Any]] = [run.train, lambda: steps_of(run)]
    for what in again if saved else [*again, run.save]:
        with pytest.raises(minillm.Refusal, match="the run has ended") as refused:
            what()
        assert "Run.open(out)" in str(refused.value.fix)
    if saved:
        assert run.save() == Path("a/checkpoints/step-00000003")
    assert run.generate("It was", max_tokens=2).startswith("It was")
    done = make("b").train()
    assert (done.train().step, steps_of(done), done.save().name) == (12, [], "step-00000012")


def test_a_folder_may_be_in_the_home_folder(
    make: Callable[..., minillm.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    assert make("~/a").out == tmp_path / "home/a"


def test_a_run_without_checkpoints_saves_none(make: Callable[..., minillm.Run]) -> None:
    run = make("a", **{"checkpoint.every": 0})
    assert steps_of(run, until=2) == [1, 2]
    with pytest.raises(minillm.Refusal, match="keeps no checkpoints"):
        run.save()
    run.close()


def test_longer_windows_than_the_model_that_is_trained(make: Callable[..., minillm.Run]) -> None:
    with pytest.raises(minillm.Refusal, match="rows of 16 tokens"):
        make().evaluate("a.txt", seq_len=17)


def test_a_run_is_stepped_by_hand(make: Callable[..., minillm.Run]) -> None:
    run = make()
    before = run.validate()
    with run.batches() as batches:
        for _ in range(3):
            batch = next(batches)
            values = run.plan.values(0.5)
            run.trainer.read(run.trainer.step(batch.micro, values, batch.supervised))
    assert batch.micro[0]["ids"].shape == (2, 16)
    assert run.validate().val_loss < before.val_loss
    assert run.validate(50).tokens < before.tokens


def test_the_held_out_text_is_measured_as_at_the_end(make: Callable[..., minillm.Run]) -> None:
    run = make()
    *_, last = (one for one in run.steps() if isinstance(one, minillm.Evaluated))
    assert run.validate() == last


def test_a_run_that_is_only_opened_has_nothing_to_step(
    make: Callable[..., minillm.Run], options: dict[str, Any]
) -> None:
    make("a").train()
    run = minillm.Run.open("a", **options)
    for use in (lambda: run.trainer, run.batches, run.validate):
        with pytest.raises(minillm.Refusal, match="reads its model alone"):
            use()


def test_runs_share_a_text_and_are_silent(
    settings: dict[str, Any], options: dict[str, Any]
) -> None:
    config = minillm.load("tiny", settings=settings | {"eval.every": 6, "eval.samples": 1})
    plan, silent = minillm.build_plan(config), LineDisplay(lambda line: None)
    text = read_corpus(plan.config, options["cache"], silent, say=silent.say)
    warned: list[str] = []
    shared = Shared(text, Detected("torch", "cpu", "the test says so"), warn=warned.append)
    found = {}
    for name, more in (("shared", {"shared": shared, "cache": "none"}), ("alone", {})):
        run = minillm.Run(plan, **(options | more))
        found[name] = [one for one in run.steps() if isinstance(one, minillm.Evaluated)]
    assert [one.step for one in found["alone"]] == [0, 6, 12]
    assert found["shared"] == found["alone"][1:]
    assert not warned
    assert not Path("none").exists()


def test_a_run_continues_a_prompt_as_its_folder_does(
    make: Callable[..., minillm.Run], options: dict[str, Any]
) -> None:
    run = make("a").train()
    drawn = {"max_tokens": 9, "temperature": 0.7, "seed": 4}
    text = run.generate("It was", **drawn)
    assert text.startswith("It was")
    assert minillm.Run.open("a", **options).generate("It was", **drawn) == text
    with pytest.raises(minillm.Refusal, match="temperature"):
        run.generate("It", temperature=-1)
    for name, wrong in (("max_tokens", 0), ("seed", -1)):
        with pytest.raises(minillm.Refusal, match=f"{name} cannot be {wrong}"):
            run.generate("It", **{name: wrong})
    wrong_step: Any = "8"
    with pytest.raises(minillm.Refusal, match="a step is a whole number, not '8'"):
        minillm.Run.open("a", step=wrong_step, **options).generate("It")


API: Any = minillm  # misused below


class Trick(minillm.Plugin, api=1):
    """A class that no entry point names."""


MISUSE: list[tuple[Callable[[Any], Any], str]] = [
    (lambda run: API.load("tiny", plugins=Trick), "plugins are given by name"),
    (lambda run: API.load("tiny", plugins=[Trick]), "plugins are given by name"),
    (lambda run: API.Run("a"), "Run needs a plan"),
    (lambda run: API.build_plan("tiny"), r"build_plan\('tiny'\)"),
    (lambda run: API.Run.open(run.out, settings={"train.stepz": 7}), "stepz"),
    (lambda run: run.logits([1.5, 2.0]), r"float64 \(2,\) where the ids of a row"),
    (lambda run: run.logits([]), r"float64 \(0,\) where"),
    (lambda run: run.logits([[1, 2]]), r"int64 \(1, 2\) where"),
    (lambda run: run.logits("abc"), r"<U3 \(\) where"),
    (lambda run: run.losses([1, 2, 3]), r"int64 \(\) where"),
    (lambda run: run.losses([]), r"float64 \(0,\) where"),
    (lambda run: run.losses([[2**32, 1]]), "a row of 2 ids from 1 to 2147483647"),
    (lambda run: run.generate(5), "a prompt is a text"),
    (lambda run: run.generate([1, 2]), "a prompt is a text"),
    (lambda run: run.stream(5), r"int64 \(\) where the ids of a row are needed"),
    (lambda run: run.stream([]), r"float64 \(0,\) where"),
    (lambda run: run.evaluate([]), "no file is named"),
    (lambda run: run.evaluate("a text\n" * 1000), "cannot be read: File name too long"),
    (lambda run: run.evaluate("a", seq_len=0), "seq_len cannot be 0"),
    (lambda run: run.evaluate("a", max_tokens=-1), "max_tokens cannot be -1"),
    (lambda run: run.validate(0), "tokens cannot be 0"),
    (lambda run: API.load("tiny", plugins=5), "plugins are given by name"),
    (lambda run: API.Run.open(run.out, plugins=3), "plugins are given by name"),
    (lambda run: API.load("tiny", data=5), "no file is named"),
    (lambda run: run.evaluate(None), "no file is named"),
    (lambda run: API.load("tiny", data=""), "a path of the data is empty"),
    (lambda run: API.load("tinny"), "there is no preset 'tinny'"),
    (lambda run: API.Run.open(""), "the path of a folder cannot be ''"),
    (lambda run: API.Run.open(None), "the path of a folder cannot be None"),
    (lambda run: API.Run(run.plan, out=""), "the path of a folder cannot be ''"),
    (lambda run: API.Run(run.plan, out=run.out), "holds a run already"),
    (lambda run: run.losses(None), r"object \(\) where the ids of a row"),
    (lambda run: run.evaluate("a", seq_len="8"), "seq_len cannot be '8'"),
    (lambda run: run.generate("a", max_tokens="5"), "max_tokens cannot be '5'"),
    (lambda run: run.generate("a", temperature="hot"), "temperature cannot be 'hot'"),
    (lambda run: run.generate("a", top_k=2.5), "top_k cannot be 2.5"),
    (lambda run: run.generate("a", top_p=None), "top_p cannot be None"),
    (lambda run: run.generate("a", cached="no"), "cached cannot be 'no'"),
    (lambda run: run.generate("a\ud800"), "a lone surrogate"),
    (lambda run: run.stream("a", ends=5), r"int64 \(\) where the ids"),
    (lambda run: run.export("x", shard_bytes=0), "shard_bytes cannot be 0"),
    (lambda run: run.export("x", shard_bytes="a"), "shard_bytes cannot be 'a'"),
    (lambda run: run.export(run.out), "is not empty"),
]


def test_what_cannot_be_used_is_refused_with_what_can(make: Callable[..., minillm.Run]) -> None:
    run = make("a").train()
    for misuse, said in MISUSE:
        with pytest.raises(minillm.MinillmError, match=said) as error:
            misuse(run)
        assert error.value.fix
        assert not str(error.value.fix).startswith("--"), "what to type in a terminal"
