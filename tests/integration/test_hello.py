"""Test of the third-party plugin example: its wheel, with the core's, in a clean environment."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full


@pytest.fixture
def hello(environment: Any, wheels: dict[str, Path]) -> Any:
    environment.install(wheels["minillm-hello"])
    return environment


def test_hello_is_installed_shown_trained_with_and_keeps_the_contract(
    hello: Any, repository: Path, tmp_path: Path
) -> None:
    listed = json.loads(hello.run("minillm_core", "plugins", "list", "--json", cwd=tmp_path))
    (entry,) = [entry for entry in listed if entry["name"] == "hello"]
    assert (entry["state"], entry["distribution"]) == ("ok", "minillm-hello")
    shown = json.loads(
        hello.run("minillm_core", "plugins", "info", "hello", "--json", cwd=tmp_path)
    )
    assert shown["slots"] == ["loss.logits[z]: 0.0001"]
    assert Path(shown["file"]).is_relative_to(hello.folder)  # of the wheel, not the working tree

    weight, losses, held_out = 0.01, {}, {}
    for out, named in (("with", ("--plugins", "hello", f"hello.weight={weight}")), ("without", ())):
        small = ("train.rows=2", "train.seq_len=64", "eval.tokens=512", "eval.samples=0")
        asked = (*named, "--steps", "10", *small, "--out", out)
        hello.run("minillm_core", "train", *asked, cwd=tmp_path)
        lines = (tmp_path / out / "metrics.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        losses[out] = [event["loss"] for event in events if event["event"] == "step"]
        held_out[out] = [event["val_loss"] for event in events if event["event"] == "eval"]
    assert len(losses["with"]) == len(losses["without"]) == 10
    # Both start from the same weights, where logits are small: lse is about log V.
    term = weight * math.log(4096) ** 2
    assert losses["with"][0] - losses["without"][0] == pytest.approx(term, rel=0.05)
    assert held_out["with"][-1] < held_out["without"][-1] + term / 2  # which excludes the z-loss
    (record,) = json.loads((tmp_path / "with" / "run.json").read_text())["plugins"]
    assert record["distribution"] == "minillm-hello"
    assert record["evidence"]["shown"]

    tests = shutil.copytree(repository / "examples" / "minillm_hello" / "tests", tmp_path / "tests")
    said = hello.run("pytest", "-q", "--import-mode=importlib", tests, cwd=tests)
    assert " passed" in said


def test_its_file_can_be_read_at_a_glance(repository: Path) -> None:
    (file,) = repository.glob("examples/minillm_hello/minillm_hello/hello.py")
    assert len(file.read_text().splitlines()) <= 60
