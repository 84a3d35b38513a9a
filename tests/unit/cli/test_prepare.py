"""Tests of the path from a command line to config, backend and plugins; and of its errors."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minillm_core.backends import detect
from minillm_core.backends.detect import InstalledFramework, Machine
from minillm_core.config.folders import cache_folder
from minillm_core.errors import BackendError, DataError, PluginError
from minillm_core.train.request import RunRequest, prepare

Program = Callable[..., tuple[int, str, str]]

TRICK = '''
from minillm_core.plugins.options import option
from minillm_core.plugins.plugin import Plugin


class Trick(Plugin, api=1, backends=("mlx",)):
    """A trick."""

    width: int = option(8, ge=1, help="features")
'''


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the probe find this machine."""

    def become(**facts: Any) -> None:
        monkeypatch.setattr(detect, "probe", lambda: Machine(**facts))

    return become


GPU = {"nvidia": 1, "torch": InstalledFramework("2.13", cuda=True)}


@pytest.mark.parametrize(
    ("facts", "asked", "preset", "device"),
    [
        (GPU, RunRequest(), "small", "cuda"),
        (GPU, RunRequest(flags={"--device": "cpu"}), "tiny", "cpu"),
        (GPU, RunRequest(assignments=("device=cpu",)), "tiny", "cpu"),
        (GPU, RunRequest(preset="350m"), "350m", "cuda"),
        ({"torch": InstalledFramework("2.13")}, RunRequest(), "tiny", "cpu"),
        ({"apple": True, "mlx": InstalledFramework("0.32")}, RunRequest(), "small", "gpu"),
    ],
)
def test_the_machine_decides_where_nobody_does(machine, facts, asked, preset, device) -> None:
    machine(**facts)
    prepared = prepare(asked, to_run=True)
    assert prepared.detected is not None
    assert (prepared.loaded.config.preset, prepared.detected.device) == (preset, device)


def test_a_plan_needs_no_framework_and_a_run_does(machine) -> None:
    machine()
    assert prepare(RunRequest(), to_run=False).detected is None
    with pytest.raises(BackendError, match="no backend is installed"):
        prepare(RunRequest(), to_run=True)


@pytest.mark.parametrize("to_run", [False, True])
def test_a_backend_asked_for_by_name_must_be_there(machine, to_run: bool) -> None:
    machine(
        torch=InstalledFramework("2.13"),
        mlx=InstalledFramework("0.32", broken="its library libmlx is missing"),
    )
    with pytest.raises(BackendError, match="libmlx is missing"):
        prepare(RunRequest(flags={"--backend": "mlx"}), to_run=to_run)


def test_plugins_are_loaded_with_their_options(machine, tmp_path: Path) -> None:
    machine(mlx=InstalledFramework("0.32"))
    (tmp_path / "trick.py").write_text(TRICK)
    asked = RunRequest(plugins=f"{tmp_path}/trick.py:Trick", assignments=("trick.width=3",))
    (plugin,) = prepare(asked, to_run=True).plugins
    assert plugin.plugin.options() == {"width": 3}


def test_a_plugin_that_cannot_run_here_is_refused(machine, tmp_path: Path) -> None:
    machine(torch=InstalledFramework("2.13"))
    (tmp_path / "trick.py").write_text(TRICK)
    with pytest.raises(PluginError, match="does not run on backend torch"):
        prepare(RunRequest(plugins=f"{tmp_path}/trick.py:Trick"), to_run=True)


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--preset", "tinny"], "there is no preset 'tinny'"),
        (["--steps", "0"], "train.steps must be a whole number of at least 1"),
        (["--kernels", "?"], "'?' is not a policy for kernels"),
        (["--kernels", "attention=quick"], "no kernel 'quick' for attention"),
        (["--kernels", "atention=sdpa"], "no op 'atention' in this plan"),
        (["--kernels", "swiglu=liger"], "no kernel 'liger' for swiglu"),
        (["-c", "absent.toml"], "the settings file cannot be read"),
        (["muon.lr=1"], "'muon' is neither a table of settings nor a plugin"),
        (["--plugins", "-muon"], "plugin 'muon' cannot be taken away"),
        (["--plugins", "no_such_plugin"], "no_such_plugin"),
        (["--backend", "jax"], "backend must be one of auto, torch, mlx"),
        (["--device", "tpu"], "no backend knows a device 'tpu'"),
    ],
)
def test_refusals_write_nothing(
    program: Program, tmp_path, monkeypatch, command: str, arguments: list[str], what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = program(command, "--out", "run", *arguments)
    assert (code, out) == (2, "")
    assert what in err
    assert err.count("\n") <= 12
    assert list(tmp_path.iterdir()) == []


def test_a_difference_names_both_sets(program: Program) -> None:
    code, _, err = program("plan", "--plugins", "a", "--diff", "a", "b")
    assert code == 2
    assert "--diff names both sets of plugins" in err


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"MINILLM_CACHE": "/a"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/minillm")),
        ({}, Path.home() / ".cache" / "minillm"),
    ],
)
def test_the_environment_says_where_the_cache_is(monkeypatch, environment, folder) -> None:
    for name in ("MINILLM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == folder


@pytest.mark.parametrize(
    ("assignments", "vocab", "origin"),
    [((), 512, "the size of the text"), (("model.vocab=1000",), 1000, "command line")],
)
def test_a_small_text_gets_a_small_vocabulary_unless_one_is_given(
    machine, tmp_path: Path, assignments: tuple[str, ...], vocab: int, origin: str
) -> None:
    machine(torch=InstalledFramework("2.13"))
    (tmp_path / "a.txt").write_text("a few words\n" * 1000)
    asked = RunRequest(assignments=assignments, flags={"--data": [str(tmp_path / "a.txt")]})
    loaded = prepare(asked, to_run=True).loaded
    assert loaded.config.model.vocab == vocab
    assert loaded.origins["model.vocab"] == origin
    assert any("800 bytes of text" in note for note in loaded.notes) == (vocab == 512)


def test_a_plan_bears_data_that_are_not_there(machine, tmp_path: Path) -> None:
    machine(torch=InstalledFramework("2.13"))
    asked = RunRequest(flags={"--data": [str(tmp_path / "gone.txt")]})
    assert prepare(asked, to_run=False).loaded.config.model.vocab == 4096
    with pytest.raises(DataError):
        prepare(asked, to_run=True)


@pytest.mark.parametrize("command", ["train", "bench", "plan"])
def test_an_init_that_is_no_path_is_refused(program, command: str) -> None:
    code, out, err = program(command, "init=5")
    assert (code, out) == (2, "")
    assert err.startswith("init is the path of a model directory, not 5")


@pytest.mark.parametrize("key", ["rows", "accumulate"])
@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_step_that_no_machine_holds_is_refused_at_once(program, command: str, key: str) -> None:
    code, out, err = program(command, "--preset", "tiny", f"train.{key}=1000000000000")
    assert (code, out) == (2, "")
    assert "is more than any machine holds" in err
    assert f"train.{key} = 1000000000000 (command line)" in err


def test_the_first_line_of_a_run_waits_for_no_array_library(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from minillm_core.cli import console, main\n"
        "heavy = {'torch', 'mlx', 'numpy', 'tokenizers', 'rich.live'}\n"
        "def first(text):\n"
        "    print(text, sorted(heavy & set(sys.modules)))\n"
        "    raise SystemExit\n"
        "console.say = first\n"
        "main.main(['train', '--device', 'cpu', '--preset', 'tiny'])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert re.match(r"\w+ on cpu, preset tiny, writing to runs/tiny-1 \(.*\) \[\]", found.stdout)
