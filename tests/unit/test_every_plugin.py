"""Tests that every plugin is tested and tried, or has a reason for an exception."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from minillm_core.plugins.discover import GROUP
from minillm_core.plugins.manager import find, with_options
from tools.every_plugin import ALONE, APART, OPTIONS, Form, all_at_once, forms
from tools.repository import ours


def test_every_entry_point_of_the_repository_is_there(repository: Path) -> None:
    folders = {path.parent.name for path in repository.glob("plugins/*/pyproject.toml")}
    installed = {
        one.name
        for one in entry_points(group=GROUP)
        if one.dist is not None and one.dist.name.replace("-", "_") in folders
    }
    assert installed == set(ours()) == {form.name for form in forms()}


def test_options_are_of_plugins_that_there_are() -> None:
    assert set(OPTIONS) <= set(ours())
    assert {key.partition(".")[0] for key in APART} <= set(ours())
    for name, given in OPTIONS.items():
        for options in given:
            with_options(find(name), options)


def test_what_is_left_out_says_why() -> None:
    listens = "it listens, and computes nothing"
    chooses = "it chooses the rows of a step, and computes nothing in it"
    assert {form.name: form.left_out for form in forms() if form.left_out} == {
        **dict.fromkeys(
            ("cute", "fp8_head", "fp8_mlp", "fused_relu2", "fused_swiglu", "liger", "triton"),
            "it runs on cuda alone",
        ),
        "metal": "it runs on gpu alone",
        **dict.fromkeys(("early_stop", "tensorboard", "throttle", "trackio", "wandb"), listens),
        **dict.fromkeys(
            (
                *("best_fit", "domain_tokens", "eos_align", "fim"),
                *(
                    "length_buckets",
                    "length_curriculum",
                    "seq_schedule",
                    "sft",
                    "shuffle_rows",
                    "source_weights",
                ),
            ),
            chooses,
        ),
        **dict.fromkeys(("distill", "jest", "rho1"), "it reads a model that was trained before"),
    }
    names, _ = all_at_once()
    shown = {form.name for form in forms() if form.left_out is None}
    assert {*names, *ALONE} == shown
    assert not {*names} & {*ALONE}


@pytest.mark.parametrize(
    ("form", "names", "shown"),
    [
        (Form("moe", {"chosen": 2}), ("moe",), "moe[chosen=2]"),
        (Form("normuon"), ("normuon", "muon"), "normuon"),
    ],
)
def test_a_plugin_comes_with_what_it_builds_on(form: Form, names: tuple, shown: str) -> None:
    assert form.names == names
    assert str(form) == shown
