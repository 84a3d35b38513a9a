"""Tests of the wheels in empty environments: the core alone, with each extra, and mixed versions."""

from __future__ import annotations

import json
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.full

FEW = ("train.rows=2", "train.seq_len=64", "eval.tokens=512", "eval.samples=0")
"""Added to `minillm train --steps 5`; the core alone runs that command without them."""

QUICK = ("--quiet", "--no-compile")
"""Of `pip install`: what is imported is compiled then, a part of what is installed."""


@pytest.fixture(scope="module")
def libraries(repository: Path, link_libraries: Any, tmp_path_factory: Any) -> Path:
    """Make a site-packages with pip, torch, what the core's wheel requires, and nothing else."""
    folder = tmp_path_factory.mktemp("libraries")
    core = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    torch = core["optional-dependencies"]["torch"]
    link_libraries(folder, "pip", *core["dependencies"], *torch)
    return folder


@pytest.fixture(scope="module")
def alone(
    wheels: dict[str, Path], libraries: Path, make_environment: Any, tmp_path_factory: Any
) -> Any:
    """Create an environment with only the core's wheel and torch; pip finds that nothing is missing."""
    made = make_environment(tmp_path_factory.mktemp("alone"), libraries, PIP_NO_INDEX="1")
    made.run("pip", "install", *QUICK, f"{wheels['minillm-core']}[torch]", cwd=made.folder)
    return made


@pytest.fixture(scope="module")
def beside(
    wheels: dict[str, Path],
    alone: Any,
    libraries: Path,
    make_environment: Any,
    tmp_path_factory: Any,
) -> Callable[[str], Any]:
    """Create an environment like the core's, with an extra of it from the wheels alone."""

    @cache
    def make(extra: str) -> Any:
        made = make_environment(
            tmp_path_factory.mktemp(extra),
            libraries=f"{alone.site}\n{libraries}",
            # pip's sources in tests: the wheels, and no index.
            PIP_NO_INDEX="1",
            PIP_FIND_LINKS=wheels["minillm-core"].parent,
            XDG_CACHE_HOME=alone.variables["XDG_CACHE_HOME"],
        )
        made.run("pip", "install", *QUICK, f"minillm-core[{extra}]", cwd=made.folder)
        return made

    return make


@pytest.fixture(scope="module")
def everything(beside: Callable[[str], Any]) -> Any:
    """Create an environment with the extra ``all``."""
    return beside("all")


def older(wheel: Path, folder: Path) -> Path:
    """Return the same wheel as version 0.0.1."""
    version = wheel.name.split("-")[1]
    path = folder / wheel.name.replace(version, "0.0.1")
    with ZipFile(wheel) as source, ZipFile(path, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith(".dist-info/METADATA"):
                data = data.replace(f"\nVersion: {version}".encode(), b"\nVersion: 0.0.1")
            renamed = name.replace(f"-{version}.dist-info/", "-0.0.1.dist-info/")
            target.writestr(renamed, b"" if name.endswith("/RECORD") else data)
    return path


def steps(out: Path) -> list[int]:
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [event["step"] for event in events if event["event"] == "step"]


def test_the_core_alone_trains(alone: Any, tmp_path: Path) -> None:
    program = alone.folder / "bin" / "minillm"
    command = [program, "train", "--steps", "5"]
    trained = subprocess.run(
        command, cwd=tmp_path, env=alone.variables, capture_output=True, text=True, timeout=600
    )
    assert trained.returncode == 0, trained.stderr
    out = tmp_path / "runs" / "tiny-1"
    assert steps(out) == [1, 2, 3, 4, 5]
    assert json.loads((out / "run.json").read_text())["plugins"] == []
    assert json.loads(alone.run("minillm_core", "plugins", "list", "--json", cwd=tmp_path)) == []

    (tmp_path / "theirs").mkdir()
    for words in (("export", str(out), "--to", "model"), ("train", "--init", "theirs")):
        refused = alone.call("minillm_core", *words, cwd=tmp_path)
        assert refused.returncode == 2
        assert "pip install minillm-hf torch===" in refused.stderr
    assert not (tmp_path / "model").exists()


def test_what_the_core_alone_lacks_is_named_with_its_pip_line(alone: Any, tmp_path: Path) -> None:
    refused = alone.call("minillm_core", "train", "--plugins", "muon,paired_heads", cwd=tmp_path)
    assert refused.returncode == 2
    assert "pip install minillm-modded minillm-muon torch===" in refused.stderr
    for words in (("new", "my_trick"), ("check", "muon")):
        refused = alone.call("minillm_core", "plugins", *words, cwd=tmp_path)
        assert refused.returncode == 2
        assert "pip install minillm-kit" in refused.stderr
    assert "by minillm-lab" in alone.run("minillm_core", "plan", cwd=tmp_path)


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        (("ablate", "--plugins", "muon"), "minillm-lab"),
        (("bench",), "minillm-lab"),
        (("report", "runs/tiny-1"), "minillm-lab"),
        (("doctor",), "minillm-lab"),
        (("chat", "runs/tiny-1"), "minillm-chat"),
        (("train", "--task", "sft"), "minillm-chat"),
        (("eval", "runs/tiny-1", "--chats", "chats.jsonl"), "minillm-chat"),
        (("data", "cache", "list"), "minillm-data"),
        (("data", "tokenize", "text.txt", "--to", "tokens"), "minillm-data"),
        (("plugins", "new", "my_trick"), "minillm-kit"),
        (("plugins", "check", "muon"), "minillm-kit"),
    ],
)
def test_a_command_of_another_distribution_is_named_with_its_pip_line(
    alone: Any, tmp_path: Path, command: tuple[str, ...], needed: str
) -> None:
    refused = alone.call("minillm_core", *command, cwd=tmp_path)
    assert refused.returncode == 2
    assert f"pip install {needed} torch===" in refused.stderr


def test_the_kit_s_first_name_says_the_pip_line(alone: Any, tmp_path: Path) -> None:
    script = tmp_path / "a.py"
    script.write_text("from minillm_core.testing import conformance\n")
    failed = subprocess.run(
        [alone.python, script], env=alone.variables, capture_output=True, text=True
    )
    assert "pip install minillm-kit" in failed.stderr


def test_the_core_and_the_laboratory(beside: Callable[[str], Any], tmp_path: Path) -> None:
    lab = beside("lab")
    lab.run("minillm_core", "train", "--steps", "5", "--out", "run", *FEW, cwd=tmp_path)
    page = lab.run("minillm_core", "report", "run", cwd=tmp_path).strip()
    assert "<svg" in (tmp_path / page).read_text()
    assert "torch" in lab.run("minillm_core", "doctor", cwd=tmp_path)
    assert "as in a run" in lab.run("minillm_core", "plan", *FEW, cwd=tmp_path)
    assert lab.call("minillm_core", "plugins", "new", "a", cwd=tmp_path).returncode == 2


def test_the_core_and_model_directories(beside: Callable[[str], Any], tmp_path: Path) -> None:
    hf = beside("hf")
    hf.run("minillm_core", "train", "--steps", "5", "--out", "run", *FEW, cwd=tmp_path)
    hf.run("minillm_core", "export", "run", "--to", "model", cwd=tmp_path)
    again = ("--init", "model", "--steps", "1", "--out", "again", *FEW)
    hf.run("minillm_core", "train", *again, cwd=tmp_path)


def test_the_core_and_the_kit(beside: Callable[[str], Any], tmp_path: Path) -> None:
    kit = beside("kit")
    kit.run("minillm_core", "train", "--steps", "5", "--out", "run", *FEW, cwd=tmp_path)
    kit.run("minillm_core", "plugins", "new", "my_trick", "--kind", "loss", cwd=tmp_path)
    plugin = "minillm-my_trick/minillm_my_trick/my_trick.py:MyTrick"
    checks = ("--only", "forward", "--backend", "torch")
    checked = kit.run("minillm_core", "plugins", "check", plugin, *checks, cwd=tmp_path)
    assert "my_trick on torch: " in checked
    assert kit.call("minillm_core", "doctor", cwd=tmp_path).returncode == 2


def test_a_script_on_the_api_from_a_wheel(
    beside: Callable[[str], Any],
    alone: Any,
    libraries: Path,
    wheels: dict[str, Path],
    make_environment: Any,
    tmp_path: Path,
) -> None:
    made = make_environment(
        tmp_path,
        libraries=f"{alone.site}\n{libraries}",
        XDG_CACHE_HOME=alone.variables["XDG_CACHE_HOME"],
    )
    made.install(wheels["minillm-sweep"])
    text = tmp_path / "text.txt"
    text.write_text("It was a dark and stormy night; the rain fell in torrents.\n" * 200)
    rates = ("0.00001", "0.003")
    command = [made.folder / "bin" / "minillm-sweep", *rates, "--steps", "5", "--data", text]
    swept = subprocess.run(
        command, cwd=tmp_path, env=made.variables, capture_output=True, text=True, timeout=600
    )
    assert swept.returncode == 0, swept.stderr
    assert swept.stdout.endswith("best: lr 0.003\n")


def test_the_wheels_list_and_train(everything: Any, tmp_path: Path) -> None:
    listed = everything.run("minillm_core", "plugins", "list", "--json", cwd=tmp_path)
    assert all(f'"{name}"' in listed for name in ("muon", "paired_heads", "liger", "wandb"))

    asked = ("--plugins", "muon,paired_heads", "--steps", "20", *FEW)
    everything.run("minillm_core", "train", *asked, cwd=tmp_path)
    out = tmp_path / "runs" / "tiny-1"
    run = json.loads((out / "run.json").read_text())
    assert run["exit"] == 0
    assert {plugin["name"]: plugin["distribution"] for plugin in run["plugins"]} == {
        "muon": "minillm-muon",
        "paired_heads": "minillm-modded",
    }
    assert steps(out) == list(range(1, 21))
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert any(event["event"] == "eval" for event in events)
    assert (out / "tokenizer.json").is_file()
    # a slow machine also keeps some of the earlier steps
    assert max(path.name for path in (out / "checkpoints").iterdir()) == "step-00000020"


def test_a_mix_of_versions_is_refused_and_its_line_mends_it(
    everything: Any, wheels: dict[str, Path], tmp_path: Path
) -> None:
    plan = ("minillm_core", "plan", "--plugins", "muon,paired_heads")
    everything.install(older(wheels["minillm-muon"], tmp_path))
    refused = everything.call(*plan, cwd=tmp_path)
    assert refused.returncode == 2
    core = wheels["minillm-core"].name.split("-")[1]
    assert f"minillm-muon 0.0.1 beside minillm-core {core}" in refused.stderr
    (fix,) = (line for line in refused.stderr.splitlines() if "fix:" in line)
    line = shlex.split(fix.partition("fix:")[2])
    assert line[:3] == ["pip", "install", "--upgrade"]
    everything.run("minillm_core", "plan", "--plugins", "paired_heads", cwd=tmp_path)

    found = json.loads(everything.call("minillm_core", "doctor", "--json", cwd=tmp_path).stdout)
    (mix,) = (one for one in found["findings"] if "minillm-muon 0.0.1 beside" in one["what"])
    assert shlex.split(mix["command"]) == line

    everything.run(*line, cwd=tmp_path)
    everything.run(*plan, cwd=tmp_path)


def test_make_wheels_builds_an_sdist_and_a_wheel_of_each(
    wheels: dict[str, Path], repository: Path
) -> None:
    """The fixture builds as ``make wheels`` does, including twine's check."""
    version = wheels["minillm-core"].name.split("-")[1]
    stems = {
        f"{path.parent.name}-{version}" for path in repository.glob("*/minillm_*/pyproject.toml")
    }
    built = {path.name for path in wheels["minillm-core"].parent.iterdir()}
    for stem in {*stems, f"minillm_core-{version}"}:
        assert {f"{stem}.tar.gz", f"{stem}-py3-none-any.whl"} <= built
    assert len(built) == 2 * (len(stems) + 1)
