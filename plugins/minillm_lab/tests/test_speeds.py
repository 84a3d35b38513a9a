"""Tests of measured speeds, and of a plan's time estimate from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minillm_core import Plugin
from minillm_core.backends.base import Binding
from minillm_core.config.load import load
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_lab import speeds
from minillm_lab.speeds import FILE, Expected, expected, known_tokens, remember

SIZES = ("model.layers=1", "model.dim=16", "model.heads=2", "model.kv_heads=2", "model.hidden=32")
SIZES += ("model.vocab=300", "train.rows=2", "train.seq_len=16")

Planned = Callable[..., Plan]


class Scale(Plugin, api=1):
    """Attention's scale."""

    by: float = 0.5

    def build_attention(self, attn: Any) -> None:
        attn.scale(self.by)


def planned(*settings: str, plugin: Plugin | None = None) -> Plan:
    loaded = load(
        preset="tiny",
        assignments=[*SIZES, *settings],
        default_preset=lambda: ("tiny", "the test"),
    )
    return build_plan(loaded.config, [LoadedPlugin.of("scale", plugin)] if plugin else [])


def job(plan: Plan, device: str = "cpu", tokens: int = 1234) -> tuple[Plan, Binding, int]:
    """Build the attributes of a run that are read here."""
    return plan, Binding("torch", device, "A CPU", "", "float32", False, False, False), tokens


def ask(
    cache: Path, plan: Plan, device: str = "cpu", ratio: float | None = None
) -> Expected | None:
    return expected(cache, plan, "torch", device, "float32", lambda plugin, hardware: ratio)


def test_the_same_plan_is_as_fast_as_it_was_whatever_its_length(tmp_path: Path) -> None:
    remember(tmp_path, *job(planned()), 1000.0, steps=20)
    found = ask(tmp_path, planned("train.steps=7", "train.lr=0.5", "eval.tokens=10"))
    assert found is not None
    assert found.tokens_per_second == 1000.0
    assert found.basis.startswith("as in a run of 2")


def test_a_newer_measurement_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    for speed in (1000.0, 1500.0):
        remember(tmp_path, *job(planned()), speed, steps=20, by="bench")
    found = ask(tmp_path, planned())
    assert found is not None
    assert found.tokens_per_second == 1500.0
    assert len(json.loads((tmp_path / FILE).read_bytes())["speeds"]) == 1


def test_another_model_is_expected_to_make_as_many_flops(tmp_path: Path) -> None:
    small, large = planned(), planned("model.layers=3")
    remember(tmp_path, *job(small), 1000.0, steps=20)
    found = ask(tmp_path, large)
    assert found is not None
    flops = [plan.estimate().flops_per_token for plan in (small, large)]
    assert found.tokens_per_second == pytest.approx(1000.0 * flops[0] / flops[1])
    assert "another model" in found.basis


def test_a_card_made_on_this_hardware_says_what_a_plugin_costs(tmp_path: Path) -> None:
    remember(tmp_path, *job(planned()), 1000.0, steps=20)
    found = ask(tmp_path, planned(plugin=Scale()), ratio=0.8)
    assert found is not None
    assert found.tokens_per_second == 800.0
    assert found.basis.endswith("the cards of scale")
    other = ask(tmp_path, planned(plugin=Scale()))
    assert other is not None
    assert "FLOP/s" in other.basis
    remember(tmp_path, *job(planned(plugin=Scale(by=0.25))), 500.0, steps=20)
    assert ask(tmp_path, planned(plugin=Scale(by=0.25))) != ask(tmp_path, planned())
    options = ask(tmp_path, planned(plugin=Scale(by=0.125)))
    assert options is not None
    assert options.tokens_per_second == 500.0
    assert options.basis.startswith("as in a run of 2")
    assert options.basis.endswith(" here with other options of its plugins")


@pytest.mark.parametrize("far", ["model.hidden=20000", "--device"])
def test_what_nothing_like_it_was_measured_of_is_unknown(tmp_path: Path, far: str) -> None:
    assert ask(tmp_path, planned()) is None
    remember(tmp_path, *job(planned()), 1000.0, steps=20)
    if far == "--device":
        assert ask(tmp_path, planned(), device="cuda") is None
    else:
        assert ask(tmp_path, planned(far)) is None


def test_the_first_gpu_has_two_names(tmp_path: Path) -> None:
    remember(tmp_path, *job(planned(), device="cuda:0"), 1000.0, steps=20)
    assert ask(tmp_path, planned(), device="cuda") is not None


def test_of_a_run_of_several_processes_only_the_tokens_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_text("words " * 100)
    plan = planned(f'data.paths=["{text}"]')
    remember(cache, *job(plan), 1000.0, steps=20)
    with monkeypatch.context() as launcher:
        launcher.setenv("RANK", "0")
        launcher.setenv("WORLD_SIZE", "8")
        remember(cache, *job(plan, tokens=77), 8000.0, steps=20)
        launcher.delenv("RANK")  # one of several processes, and not of which rank
        remember(cache, *job(plan, tokens=78), 8000.0, steps=20)
    assert known_tokens(cache, plan) == 78
    found = ask(cache, plan)
    assert found is not None
    assert found.tokens_per_second == 1000.0


def test_a_few_steps_tell_nothing_and_what_is_kept_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speeds, "MOST", 4)
    remember(tmp_path, *job(planned()), 1000.0, steps=3)
    assert not (tmp_path / FILE).exists()
    plan = planned()
    for rows in range(1, 8):
        remember(tmp_path, *job(plan.with_train(rows=rows)), 1000.0, steps=20)
    assert len(json.loads((tmp_path / FILE).read_bytes())["speeds"]) == 4


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"speeds": 3, "tokens": 3}',
        b'{"speeds": [3, {}, {"plugins": [[]]}], "tokens": {"a": "b"}}',
        b"[" * 100_000,
        None,
    ],
)
def test_a_file_of_something_else_is_no_cache(tmp_path: Path, content: bytes | None) -> None:
    if content is None:
        (tmp_path / FILE).mkdir()  # nor can it be written
    else:
        (tmp_path / FILE).write_bytes(content)
    assert ask(tmp_path, planned()) is None
    remember(tmp_path, *job(planned()), 1000.0, steps=20)
    assert (ask(tmp_path, planned()) is None) == (content is None)


def test_the_tokens_of_a_corpus_are_known_until_it_changes(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("words " * 100)
    plan = planned(f'data.paths=["{text}"]')
    assert known_tokens(tmp_path / "cache", plan) is None
    remember(tmp_path / "cache", *job(plan, tokens=77), 1000.0, steps=20)
    assert known_tokens(tmp_path / "cache", plan) == 77
    assert known_tokens(tmp_path / "cache", planned()) is None
    text.write_text("words " * 101)
    assert known_tokens(tmp_path / "cache", plan) is None
