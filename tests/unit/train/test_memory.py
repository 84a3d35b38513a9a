"""Tests of ``--memory``: the split of a step into micro-batches, and refusals."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core.backends.detect import Detected
from minillm_core.errors import Refusal
from minillm_core.plan import build_plan
from minillm_core.train.memory import bytes_of, fit_memory
from minillm_core.train.request import Prepared, RunRequest, prepare

Program = Callable[..., tuple[int, str, str]]


def prepared(memory: str | None, *given: str, device: str = "cpu") -> Prepared:
    request = RunRequest(preset="tiny", assignments=given, memory=memory)
    found = prepare(request, to_run=False, fit=False)
    return replace(found, detected=Detected("torch", device, "named"))


def plan_of(one: Prepared):
    return build_plan(one.loaded.config, one.plugins)


@settings(max_examples=15)
@given(st.integers(1, 12), st.integers(1, 6), st.floats(1.0, 1.5))
def test_the_split_is_the_one_with_the_most_rows_that_fits(
    rows: int, accumulate: int, share: float
) -> None:
    sizes = (f"train.rows={rows}", f"train.accumulate={accumulate}", "model.layers=1")
    before, total = prepared(None, *sizes), rows * accumulate
    plan = plan_of(before)

    def needed(rows: int) -> int:
        return plan.with_train(rows=rows, accumulate=total // rows).estimate().bytes

    limit = round(needed(1) * share)
    after = fit_memory(replace(before, request=RunRequest(memory=f"{limit}B")))
    train = after.loaded.config.train
    assert train.rows * train.accumulate == total
    fitting = [n for n in range(1, total + 1) if total % n == 0 and needed(n) <= limit]
    assert train.rows == max(fitting)
    made = plan_of(after)
    assert made.hash == plan.hash  # the split of a step's rows does not affect what is trained
    assert made.tokens_per_step == plan.tokens_per_step
    assert made.estimate().bytes <= limit
    assert f"train.rows={train.rows} train.accumulate={train.accumulate}" in after.loaded.notes[-1]
    assert after.loaded.origins["train.rows"] == f"--memory {limit}B"


def test_without_it_nothing_changes() -> None:
    one = prepared(None)
    assert fit_memory(one) is one


def test_a_gpu_is_counted_in_its_own_dtype() -> None:
    sizes = ("train.rows=64", "model.dim=64")
    half = plan_of(prepared(None, *sizes)).estimate("bfloat16").bytes
    on_gpu, on_cpu = (
        fit_memory(prepared(f"{half}", *sizes, device=device)).loaded.config.train.rows
        for device in ("cuda", "cpu")
    )
    assert on_gpu == 64
    assert on_cpu < 64


@pytest.mark.parametrize(
    ("size", "count"),
    [("20GiB", 20 * 2**30), ("1.5 GB", 1.5e9), ("512MiB", 2**29), ("10kB", None), ("7", 7)],
)
def test_sizes_are_read(size: str, count: float | None) -> None:
    if count is None:
        with pytest.raises(Refusal, match="'10kB' is not a size"):
            bytes_of(size)
    else:
        assert bytes_of(size) == count


@pytest.mark.parametrize("size", ["", "GiB", "-1GiB", "20gib", "1e9", "20 GiB or so"])
def test_what_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(Refusal, match="is not a size"):
        bytes_of(size)


def test_checkpointing_is_suggested_where_one_row_fits_with_it() -> None:
    with pytest.raises(Refusal, match="one row takes about") as refused:
        fit_memory(prepared("1MiB", "train.seq_len=512"))
    assert "checkpointing" not in str(refused.value.fix)
    takes = re.findall(r"about ([\d.]+) MiB", refused.value.what)[0]
    with pytest.raises(Refusal, match="one row takes about") as refused:
        fit_memory(prepared(f"{float(takes) - 0.1:.1f}MiB", "train.seq_len=512"))
    assert "train.checkpointing=true (about " in str(refused.value.fix)
    fit_memory(prepared(f"{takes}MiB", "train.seq_len=512", "train.checkpointing=true"))
    with pytest.raises(Refusal, match=r"sizes of batches change in this run, by train\.stages"):
        fit_memory(prepared("1GiB", "train.stages=[{until=0.5, rows=2}]", "train.steps=10"))


def test_a_plan_shows_it(program: Program) -> None:
    code, out, err = program(
        *("plan", "--preset", "tiny", "--memory", "300MiB", "--device", "cpu", "--json"),
        *("train.rows=32", "train.seq_len=256"),
    )
    assert code == 0, err
    train = json.loads(out)["settings"]["train"]
    assert train["rows"]["origin"] == train["accumulate"]["origin"] == "--memory 300MiB"
    assert train["rows"]["value"] * train["accumulate"]["value"] == 32
    assert 1 < train["rows"]["value"] < 32
    assert "note: --memory 300MiB: train.rows=" in err


def test_a_run_is_split_and_remembers_how_and_its_resume_keeps_it(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("a few words, and more of them\n\n" * 200)
    sizes = ("model.layers=1", "model.dim=16", "model.hidden=32", "model.vocab=300")
    sizes += ("train.rows=8", "train.seq_len=32")
    plan = plan_of(prepared(None, *sizes))
    least = plan.with_train(rows=2, accumulate=4).estimate().bytes
    code, _, err = program(
        *("train", "--preset", "tiny", "--data", str(text), "--steps", "2", "--out", str(out)),
        *("--device", "cpu", "--memory", f"{least}B", "eval.samples=0", *sizes),
    )
    assert code == 0, err
    ran = tomllib.loads((out / "run.toml").read_text())["train"]
    assert (ran["rows"], ran["accumulate"]) == (2, 4)
    code, _, err = program("train", "--resume", "--out", str(out), "--memory", "1GiB")
    assert code == 2
    assert "a resumed run keeps the rows of its batches" in err
