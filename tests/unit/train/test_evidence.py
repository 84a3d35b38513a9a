"""Tests that a named plugin either shows evidence of being active, or ends the run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm_core import Run, build_plan, load
from minillm_core.backends.ranks import Ranks
from minillm_core.errors import NoEvidence
from minillm_core.train.events import Ended, Stepped, Throughput
from minillm_core.train.evidence import STEPS, Evidence


class Model:
    """The part of a trainer that evidence reads."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self.state = {
            "model.gate": np.zeros(3, np.float32),
            "model.layers.0.gate": np.ones(3, np.float32),
            "optimizer.adamw.m.gate": np.zeros(3, np.float32),
            "optimizer.adamw.steps.gate": np.asarray(10.0, np.float32),
        }
        self.asked = 0

    def witnesses(self) -> dict[str, int]:
        return self.seen

    def local_tensors(self) -> dict[str, np.ndarray]:
        self.asked += 1
        return self.state


def stepped(step: int) -> Stepped:
    return Stepped(step, 1.0, 0.1, 1, Throughput(1, 1, 1), 1.0, None, None, 1.0)


def trained(watch: Evidence, first: int = 1) -> None:
    """Run ten steps of this process, which may belong to a resumed run."""
    for step in range(first, first + STEPS):
        watch(stepped(step))


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def evidence(model: Any, counter: Counter, said: list[str]):
    def make(**expected: list[str]) -> Evidence:
        return Evidence(expected, model, seen=counter, say=said.append)

    return make


@pytest.mark.parametrize(
    "key",
    [
        "node:layers.0.attention.layout",
        "stage:muon.orthogonalise",
        "kernel:linear_cross_entropy=liger",
        "init:layers.0.gate",
    ],
)
def test_what_the_trainer_witnessed(model: Model, evidence, key: str) -> None:
    watch = evidence(muon=[key])
    model.seen[key] = 24
    trained(watch)
    assert watch.records() == {"muon": {"shown": True, "what": [f"{key} x24"]}}
    assert model.asked == 0  # no copy from the device where no parameter is relevant


@pytest.mark.parametrize("key", ["batch:packer", "event:packer"])
def test_what_was_counted_on_the_host(counter: Counter, evidence, key: str) -> None:
    watch = evidence(packer=[key])
    counter[key] += 5
    trained(watch)
    assert watch.records()["packer"]["shown"]


def test_what_is_true_by_construction(evidence) -> None:
    watch = evidence(window=["slot:layers.0.attention.window"])
    trained(watch)
    assert watch.records()["window"]["shown"]


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("gate", "optimizer.adamw.m.gate"),
        ("layers.0.gate", "model.layers.0.gate"),  # its optimizer has no state
    ],
)
def test_a_parameter_that_a_gradient_reached(model: Model, evidence, name: str, array: str) -> None:
    watch = evidence(gate=[f"parameter:{name}"])
    model.state[array][1] += 0.5  # in place, as in a backend
    trained(watch)
    assert watch.records()["gate"] == {"shown": True, "what": [f"parameter:{name} x1"]}


def test_weight_decay_alone_is_no_evidence(model: Model, evidence) -> None:
    watch = evidence(gate=["parameter:gate"])
    model.state["model.gate"] -= 0.5
    with pytest.raises(NoEvidence):
        trained(watch)


def test_a_parameter_of_the_same_last_name_is_another_one(model: Model, evidence) -> None:
    watch = evidence(gate=["parameter:gate"])
    model.state["model.layers.0.gate"][1] += 0.5
    model.state["optimizer.adamw.m.layers.0.gate"] = np.ones(3, np.float32)
    with pytest.raises(NoEvidence):
        trained(watch)


@pytest.mark.parametrize("expected", [["node:x", "parameter:gate"], []])
def test_nothing_after_ten_steps_ends_the_run(evidence, expected: list[str]) -> None:
    watch = evidence(ghost=expected)
    for step in range(1, STEPS):
        watch(stepped(step))
    watch(Ended(STEPS, 0, 1.0))
    with pytest.raises(NoEvidence, match=r"plugin 'ghost' was named, but after 10 steps") as error:
        watch(stepped(STEPS))
    assert error.value.exit_code == 3
    assert "leave out 'ghost'" in str(error.value)


def test_a_short_run_warns_and_records(evidence, said: list[str]) -> None:
    watch = evidence(ghost=["node:x"], window=["slot:w"])
    watch(stepped(STEPS - 1))
    assert watch.records() == {
        "ghost": {"shown": False, "what": [], "missing": ["node:x"]},
        "window": {"shown": True, "what": ["slot:w x1"]},
    }
    watch.warn()
    assert len(said) == 1
    assert "'ghost'" in said[0]


def test_what_is_missing_is_said_and_recorded(model: Model, evidence, said: list[str]) -> None:
    keys = [f"node:layers.{n}.gate" for n in range(12)]
    watch = evidence(gate=keys)
    model.seen = {keys[0]: 1}
    trained(watch)
    watch.warn()
    record = watch.records()["gate"]
    assert record["shown"]
    assert record["missing"][-1] == "and 3 more"
    assert said == [
        "warning: no trace of plugin 'gate' in "
        "node:layers.1.gate, node:layers.2.gate, node:layers.3.gate and 6 more"
    ]


def test_kernels_for_other_devices_are_not_missed(model: Model, evidence, said: list[str]) -> None:
    watch = evidence(liger=["kernel:rms_norm=liger", "kernel:swiglu=liger"])
    model.seen = {"kernel:rms_norm=liger": 1}
    trained(watch)
    assert said == []


def test_it_looks_once(model: Model, evidence) -> None:
    watch = evidence(gate=["node:x"])
    model.seen = {"node:x": 1}
    trained(watch)
    model.seen = {}
    for step in range(STEPS + 1, STEPS + 5):
        watch(stepped(step))
    assert watch.records()["gate"]["shown"]


def test_no_plugins_no_questions(model: Model, evidence) -> None:
    watch = evidence()
    trained(watch)
    assert watch.records() == {}
    assert model.asked == 0


class Two(Ranks):
    """This rank, and one with evidence only of the last key."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank, self.asked = rank, 0

    def all_gather(self, numbers: Any) -> list[tuple[float, ...]]:
        self.asked += 1
        return [tuple(numbers), (0.0,) * (len(numbers) - 1) + (7.0,)]


def test_another_rank_may_update_what_a_plugin_changes(
    model: Any, counter: Counter, said: list[str]
) -> None:
    ranks, keys = Two(0), ["node:seen", "stage:muon.orthogonalise"]
    model.seen["node:seen"] = 2
    watch = Evidence({"muon": keys}, model, seen=counter, say=said.append, ranks=ranks)
    assert watch.records()["muon"]["missing"] == keys[1:]  # before the ranks exchange evidence
    trained(watch)
    watch.gather()  # at the end: they have already exchanged it
    assert ranks.asked == 1
    assert watch.records()["muon"] == {"shown": True, "what": [f"{keys[0]} x2", f"{keys[1]} x7"]}
    assert not said


def test_rank_0_alone_ends_a_run_without_evidence(model: Any, counter: Counter) -> None:
    class None_(Two):
        def all_gather(self, numbers: Any) -> list[tuple[float, ...]]:
            return [tuple(numbers), (0.0,) * len(numbers)]

    def watch(rank: int) -> Evidence:
        keys = {"muon": ["stage:muon.orthogonalise"]}
        return Evidence(keys, model, seen=counter, say=lambda line: None, ranks=None_(rank))

    trained(watch(1))
    with pytest.raises(NoEvidence, match="'muon' was named"):
        trained(watch(0))


def test_evidence_of_parameters_copies_nothing_from_the_device(tmp_path: Path) -> None:
    """With tables of many parameters a copy takes seconds, in the middle of training."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 200)
    sizes = {"vocab": 300, "dim": 16, "layers": 2, "heads": 2, "kv_heads": 2, "hidden": 16}
    settings: dict[str, Any] = {f"model.{name}": size for name, size in sizes.items()}
    settings |= {"data.paths": [str(text)], "device": "cpu", "backend": "torch"}
    settings |= {"train.rows": 2, "train.seq_len": 16, "train.steps": STEPS + 2, "eval.tokens": 64}
    run = Run(build_plan(load(preset="tiny", settings=settings, plugins="value_embeds")))
    trainer = run.trainer

    def copied() -> None:
        raise AssertionError("all arrays were copied")

    trainer.arrays = trainer.local_arrays = copied
    events = list(run.steps())
    assert sum(isinstance(one, Stepped) for one in events) > STEPS
