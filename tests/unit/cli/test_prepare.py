"""From the command line to a config, a backend and plugins; and the refusals on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minillm_core.backends import detect
from minillm_core.backends.detect import Framework, Machine
from minillm_core.cli.cache import cache_folder
from minillm_core.cli.prepare import Asked, prepare
from minillm_core.errors import BackendError, PluginError

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
    """Let the probe find this machine."""

    def become(**facts: Any) -> None:
        monkeypatch.setattr(detect, "probe", lambda: Machine(**facts))

    return become


GPU = {"nvidia": 1, "torch": Framework("2.13", cuda=True)}


@pytest.mark.parametrize(
    ("facts", "asked", "preset", "device"),
    [
        (GPU, Asked(), "small", "cuda"),
        (GPU, Asked(flags={"--device": "cpu"}), "tiny", "cpu"),
        (GPU, Asked(assignments=("device=cpu",)), "tiny", "cpu"),
        (GPU, Asked(preset="350m"), "350m", "cuda"),
        ({"torch": Framework("2.13")}, Asked(), "tiny", "cpu"),
        ({"apple": True, "mlx": Framework("0.32")}, Asked(), "small", "gpu"),
    ],
)
def test_the_machine_decides_where_nobody_does(machine, facts, asked, preset, device) -> None:
    machine(**facts)
    prepared = prepare(asked, to_run=True)
    assert prepared.detected is not None
    assert (prepared.loaded.config.preset, prepared.detected.device) == (preset, device)


def test_a_plan_needs_no_framework_and_a_run_does(machine) -> None:
    machine()
    assert prepare(Asked(), to_run=False).detected is None
    with pytest.raises(BackendError, match="no backend is installed"):
        prepare(Asked(), to_run=True)


@pytest.mark.parametrize("to_run", [False, True])
def test_a_backend_asked_for_by_name_must_be_there(machine, to_run: bool) -> None:
    machine(torch=Framework("2.13"), mlx=Framework("0.32", broken="its library libmlx is missing"))
    with pytest.raises(BackendError, match="libmlx is missing"):
        prepare(Asked(flags={"--backend": "mlx"}), to_run=to_run)


def test_plugins_are_loaded_with_their_options(machine, tmp_path: Path) -> None:
    machine(mlx=Framework("0.32"))
    (tmp_path / "trick.py").write_text(TRICK)
    asked = Asked(plugins=f"{tmp_path}/trick.py:Trick", assignments=("trick.width=3",))
    (plugin,) = prepare(asked, to_run=True).plugins
    assert plugin.plugin.options() == {"width": 3}


def test_a_plugin_that_cannot_run_here_is_refused(machine, tmp_path: Path) -> None:
    machine(torch=Framework("2.13"))
    (tmp_path / "trick.py").write_text(TRICK)
    with pytest.raises(PluginError, match="does not run on backend torch"):
        prepare(Asked(plugins=f"{tmp_path}/trick.py:Trick"), to_run=True)


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
