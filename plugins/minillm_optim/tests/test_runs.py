"""Tests of runs whose evaluated weights differ from the trained ones: each consumer uses the right ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from minillm_core import Run, build_plan, load
from minillm_core.checkpoint.read import chosen_or_refuse
from minillm_core.cli.main import main

pytest.importorskip("torch")
pytest.importorskip("mlx.core")
BACKENDS = pytest.mark.parametrize(
    "backend", [pytest.param("torch", marks=pytest.mark.slow), "mlx"]
)

SMALL = {
    **{"model.vocab": 300, "model.dim": 32, "model.layers": 1, "model.heads": 2},
    **{"model.kv_heads": 2, "model.hidden": 32, "train.rows": 2, "train.seq_len": 16},
    **{"eval.tokens": 400, "eval.every": 5, "eval.share": 1, "eval.samples": 0, "train.steps": 14},
    **{"train.compile": "off", "train.schedule": "constant", "train.lr": 0.01},
    **{"checkpoint.every": 5, "checkpoint.keep": 9},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for n in range(24):
        words = f"{n}. A dark and stormy night, the {n * n}th of them.\n" * 6
        (folder / f"{n:02d}.txt").write_text(words)
    (folder.parent / "held.txt").write_text("A stormy night and a dark one, the 33rd.\n" * 20)
    return folder


@pytest.fixture
def begun(text: Path, tmp_path: Path) -> Any:
    """Return ``begun("ema", "torch")``: a run in memory or in a folder, not yet trained."""

    def begin(plugins: str, backend: str, out: str | None = None, **settings: Any) -> Run:
        more = {k if "." in k else k.replace("_", ".", 1): v for k, v in settings.items()}
        given = {**SMALL, "data.val": str(text.parent / "held.txt"), "backend": backend, **more}
        config = load(preset="tiny", plugins=plugins, data=str(text), settings=given)
        return Run(build_plan(config), out=tmp_path / out if out else None, cache=tmp_path / "c")

    return begin


def raw_and_viewed(out: Path, step: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    held = chosen_or_refuse(out, print, step=step)
    return (
        {k.removeprefix("model."): a for k, a in held.arrays("model.").items()},
        {k.removeprefix("view."): a for k, a in held.arrays("view.").items()},
    )


@pytest.mark.slow
@BACKENDS
@pytest.mark.parametrize("name", ["ema", "schedule_free"])
def test_every_reader_takes_what_was_evaluated(
    begun: Any, text: Path, tmp_path: Path, backend: str, name: str
) -> None:
    run = begun(name, backend, "run")
    held = text.parent / "held.txt"
    *_, last = (e for e in run.steps() if type(e).__name__ == "Evaluated")
    found = run.evaluate(held, max_tokens=last.tokens)
    assert (found.val_loss, found.tokens) == (last.val_loss, last.tokens)
    assert run.tokenizer is not None
    ids = [run.tokenizer.end_of_text, *run.tokenizer.encode(["A dark"])[0]]
    logits, wrote = run.logits(ids), run.generate("A dark", max_tokens=12, seed=1)
    raw, viewed = raw_and_viewed(tmp_path / "run", 14)
    assert viewed.keys() == raw.keys()
    assert all(not np.array_equal(viewed[key], raw[key]) for key in raw)

    again = Run.open(tmp_path / "run", backend=backend, cache=tmp_path / "c")
    assert again.evaluate(held, max_tokens=last.tokens).val_loss == last.val_loss
    np.testing.assert_array_equal(again.logits(ids), logits)
    assert again.generate("A dark", max_tokens=12, seed=1) == wrote

    run.export(tmp_path / "live")  # from the device
    again.export(tmp_path / "saved")  # from the checkpoint
    for directory in ("live", "saved"):
        there = Run.open(tmp_path / directory, backend=backend)
        np.testing.assert_allclose(there.logits(ids), logits, atol=1e-5)
    plain = begun("", backend)
    reader = plain._job.trainer
    reader.load({f"model.{key}": array for key, array in raw.items()})
    assert np.abs(plain.logits(ids) - logits).max() > 1e-3  # the trained weights give other logits
    reader.load({f"model.{key}": array for key, array in viewed.items()})
    np.testing.assert_allclose(plain.logits(ids), logits, atol=1e-5)


@pytest.mark.slow
@BACKENDS
def test_init_takes_what_was_evaluated_and_a_branch_what_was_trained(
    begun: Any, tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begun("ema", backend, "run").train()
    raw, viewed = raw_and_viewed(tmp_path / "run", 10)
    origin = f"{tmp_path / 'run'}@10"

    def start(flag: str, out: str, *more: str) -> tuple[Any, Any]:
        given = ("train", flag, origin, "--out", str(tmp_path / out), "--steps", "14", *more)
        assert main(list(given)) == 0
        first = 0 if flag == "--init" else 10
        return raw_and_viewed(tmp_path / out, first)

    for out, more in (("fresh", ()), ("plain", ("--plugins", "-ema"))):
        weights, _ = start("--init", out, *more)
        assert all(np.array_equal(weights[key], viewed[key]) for key in viewed)
        assert "weights are those that it evaluates (opt.view)" in capsys.readouterr().err
    weights, views = start("--branch", "branch")
    assert all(np.array_equal(weights[key], raw[key]) for key in raw)
    assert all(np.array_equal(views[key], viewed[key]) for key in viewed)
    ours, theirs = (raw_and_viewed(tmp_path / one, 14) for one in ("branch", "run"))
    for mine, its in zip(ours, theirs, strict=True):
        assert all(np.array_equal(mine[key], its[key]) for key in its)
    capsys.readouterr()
    weights, views = start("--branch", "without", "--plugins", "-ema")
    assert all(np.array_equal(weights[key], raw[key]) for key in raw)
    assert not views
    said = capsys.readouterr().err
    assert "dropped, because this model has no place for it: optimizer.average" in said
    assert "view." not in said
    assert run.step == 14


BY_MUON = "muon,polar_express,normuon,muon_eq,head_muon,uw_floor,two_step_embed,role_lr"
STACKS = {
    "muon": (f"{BY_MUON},snoo,layer_clip,power_cooldown,freeze,embed_grad_shrink,ema", {}),
    "soap_muon": ("muon,soap_muon,head_muon,cautious_wd,ema_nesterov,infinite_lr", {}),
    "galore": ("galore,two_step_embed,snoo,cautious_wd", {"galore.rank": 4, "galore.every": 3}),
}
"""Compatible combinations; a branch from step 5 starts between the two steps of a table."""


@BACKENDS
@pytest.mark.parametrize("stack", STACKS)
def test_techniques_go_together_and_a_branch_goes_on_as_its_run(
    begun: Any, tmp_path: Path, backend: str, stack: str
) -> None:
    plugins, given = STACKS[stack]
    options = {
        **{"head_muon.heads": 1, "snoo.every": 3, "layer_clip.most": 0.1, "muon.lr": 0.01},
        **{
            "freeze.of": ["norm"],
            "freeze.until": 0.5,
            "soap_muon.every": 3,
            "role_lr.embedding": 3.0,
        },
    }
    options = {k: v for k, v in options.items() if k.partition(".")[0] in plugins.split(",")}
    run = begun(plugins, backend, "run", **options, **given, **{"model.tied": False})
    start = {name: array.copy() for name, array in run._job.trainer.arrays().items()}
    run.train()
    out, origin = str(tmp_path / "branch"), f"{tmp_path / 'run'}@5"
    assert main(["train", "--branch", origin, "--out", out, "--steps", "14"]) == 0
    ours, theirs = (raw_and_viewed(tmp_path / one, 14) for one in ("branch", "run"))
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.keys() == its.keys()
        assert all(np.array_equal(mine[key], its[key]) for key in its)
    moved = {
        key for key, array in theirs[0].items() if not np.array_equal(array, start[f"model.{key}"])
    }
    assert moved == {*theirs[0]}


@pytest.mark.slow
def test_a_run_is_read_where_the_plugin_is_not_installed(
    begun: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint has the evaluated weights: readers do not need the plugin."""
    *_, last = (e for e in begun("swa", "torch", "run").steps() if type(e).__name__ == "Evaluated")
    for module in ("minillm_core.train.restore", "minillm_core.plugins.discover"):
        known = __import__(module, fromlist=["installed_names"]).installed_names()
        without = frozenset(known) - {"swa"}
        monkeypatch.setattr(f"{module}.installed_names", lambda w=without: w)
    said: list[str] = []
    run = Run.open(tmp_path / "run", backend="torch", say=said.append)
    held = text.parent / "held.txt"
    assert run.evaluate(held, max_tokens=last.tokens).val_loss == last.val_loss
    assert any("plugin 'swa' is not installed here" in line for line in said)


@pytest.mark.slow
@pytest.mark.parametrize("plugins", ["lora,ema", "muon,ema,value_embeds", "swa,normuon,muon"])
def test_it_goes_with_others(begun: Any, tmp_path: Path, plugins: str) -> None:
    begun("", "torch", "base").train()
    if plugins.startswith("lora"):
        out = str(tmp_path / "tuned")
        given = ("--init", str(tmp_path / "base"), "--plugins", plugins, "--out", out)
        assert main(["train", *given, "--steps", "8"]) == 0
        run = Run.open(out, backend="torch")
        raw, viewed = raw_and_viewed(tmp_path / "tuned", 8)
        assert {*viewed} == {*raw} - run.plan.frozen
        assert run.plan.frozen
    else:
        run = begun(plugins, "torch", "tuned").train()
    assert run.tokenizer is not None
    ids = [run.tokenizer.end_of_text, *run.tokenizer.encode(["A dark"])[0]]
    logits = run.logits(ids)
    if run.plan.export.layout is not None:
        run.export(tmp_path / "model")
        if run.plan.export.layout == "own":  # minillm does not read its own layout
            tensors = load_file(tmp_path / "model" / "model.safetensors")
            for name, array in raw_and_viewed(tmp_path / "tuned", run.step)[1].items():
                np.testing.assert_array_equal(tensors[f"model.{name}"], array)
            return
        there = Run.open(tmp_path / "model", backend="torch")
        np.testing.assert_allclose(there.logits(ids), logits, atol=1e-4)
