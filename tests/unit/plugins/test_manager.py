"""Tests of loading named plugins, of refusals, and of calling hooks one by one."""

from __future__ import annotations

import hashlib
import itertools
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from minillm_core import install
from minillm_core.config.selection import FileSpec, Spec, spec_of
from minillm_core.errors import ConfigError, PlanError, PluginCodeError, PluginError
from minillm_core.plugins.first_party import FIRST_PARTY
from minillm_core.plugins.manager import LoadedPlugin, Manager, check_support, find, load

Make = Callable[..., str]


def typed(specs: Iterable[str]) -> list[Spec]:
    return [spec_of(one, where="the test") for one in specs]


def refused(*specs: str, options: dict[str, dict[str, Any]] | None = None) -> PluginError:
    with pytest.raises(PluginError) as error:
        load(typed(specs), options)
    assert len(str(error.value).splitlines()) <= 12
    return error.value


def raised(*specs: str) -> PluginCodeError:
    with pytest.raises(PluginCodeError) as error:
        load(typed(specs))
    assert error.value.exit_code == 3
    return error.value


# Loading


def test_what_is_named_is_loaded_and_nothing_else(site, make_plugin: Make) -> None:
    make_plugin(name="one")
    make_plugin(name="two", prelude="raise SystemExit\n")
    (one,) = load(["one"], {"one": {"width": 3}})
    file = site.folder / "pkg_one" / "trick.py"
    assert (one.name, one.distribution, one.version) == ("one", "dist-one", "1.0")
    assert one.source == "pkg_one.trick:Trick"
    assert one.digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert one.data()["options"] == {"width": 3, "layers": "all"}
    assert "pkg_two" not in sys.modules


def test_a_path_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site, make_plugin: Make
) -> None:
    make_plugin(name="one")
    odd = site.folder.rename(tmp_path / "two  spaces")
    monkeypatch.syspath_prepend(str(odd))
    (one,) = load(["one"])
    assert one.origin.file == str(odd / "pkg_one" / "trick.py")


def test_what_is_installed_is_looked_through_once(
    monkeypatch: pytest.MonkeyPatch, make_plugin: Make
) -> None:
    names = [make_plugin(name=name) for name in ("one", "two", "three")]
    looked = []
    monkeypatch.setattr(
        "minillm_core.plugins.discover.entry_points",
        lambda group: looked.append(group) or entry_points(group=group),
    )
    assert len(load(names)) == 3
    assert len(looked) == 1
    assert load([]) == ()
    assert len(looked) == 1  # and not at all without plugins


def test_the_order_of_naming_does_not_matter(make_plugin: Make) -> None:
    names = [make_plugin(name=name) for name in ("one", "two", "three")]
    orders = {tuple(one.name for one in load(order)) for order in itertools.permutations(names)}
    assert orders == {("one", "three", "two")}


def test_unknown_has_the_nearest_name(make_plugin: Make) -> None:
    make_plugin(name="sparse_gate")
    assert refused("sprase_gate").fix == "did you mean 'sparse_gate'?"
    assert "minillm plugins list" in str(refused("zzz").fix)
    make_plugin(name="yarn_rope")
    assert "minillm plugins list" in str(refused("nope").fix)  # not near enough


@pytest.mark.parametrize("name", sorted(FIRST_PARTY))
def test_one_of_ours_has_its_pip_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # none of ours is installed there
    fix = f"pip install {shlex.quote(FIRST_PARTY[name])}"
    assert refused(name).fix == fix
    assert refused(name[:-1]).fix == f"did you mean '{name}'? {fix}"
    assert not re.search(r"install minillm\b(?!-)", fix)  # the name of a third-party distribution


def test_a_name_that_nothing_can_have(site) -> None:
    with pytest.raises(ConfigError, match="cannot be a plugin's name"):
        load(["no-name"])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("api=1", "api=2", "hook API 2; this minillm has 1"),
        ("api=1", "api=1 + 0", "not a literal"),
        ("class Trick", "class Other", "defines no class Trick"),
    ],
)
def test_broken_is_refused_unimported(make_plugin: Make, old: str, new: str, reason: str) -> None:
    make_plugin(old, new, prelude="raise SystemExit\n")
    error = refused("trick")
    assert reason in error.what
    assert "dist-trick 1.0" in error.what


def test_two_distributions_of_one_name(site, make_plugin: Make, good: str) -> None:
    make_plugin()
    site.install("rival", {"trick": "pkg_rival:Trick"}, {"pkg_rival.py": good})
    assert "offered by dist-trick 1.0 and rival 1.0" in refused("trick").what
    assert "pkg_rival" not in sys.modules


def test_the_same_twice(site, make_plugin: Make, good: str) -> None:
    make_plugin()
    assert "'trick' is named twice" in refused("trick", "trick").what
    file = site.write("elsewhere/trick.py", good)
    assert "'trick' is named twice" in refused("trick", f"{file}:Trick").what
    site.install("again", {"again": "pkg_trick.trick:Trick"})
    assert "'again' and 'trick' are the same class" in refused("trick", "again").what


def test_what_the_base_class_refuses_names_the_plugin(make_plugin: Make) -> None:
    make_plugin("build_attention", "build_atention")
    error = refused("trick")
    assert error.what == "plugin 'trick': Trick.build_atention is not a hook"
    assert "build_attention" in str(error.fix)
    make_plugin("(self, attn)", "(self, attention)", name="other")
    assert "argument 'attention'" in refused("other").what


def test_a_class_that_is_no_plugin(make_plugin: Make) -> None:
    prelude = "class Base:\n    def __init_subclass__(cls, **k): ...\n"
    make_plugin("class Trick(Plugin, ", "class Trick(Base, ", prelude=prelude)
    assert "does not extend Plugin" in refused("trick").what


def test_a_wrong_option(make_plugin: Make) -> None:
    make_plugin()
    assert "x.width" not in refused("trick", options={"trick": {"width": 0}}).what
    assert "no option 'wdith'" in refused("trick", options={"trick": {"wdith": 1}}).what


# Code that raises


@pytest.mark.parametrize(
    ("statement", "shown"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise BaseException('\\x1b[31mred')", "BaseException: red"),
        ("import pkg_that_is_absent", "No module named"),
        ("def def", "SyntaxError"),
    ],
)
def test_a_failing_import_shows_the_plugins_own_frames(
    make_plugin: Make, statement: str, shown: str
) -> None:
    make_plugin(prelude=f"x = 1\n{statement}\n")
    error = raised("trick")
    assert error.what == "plugin 'trick' (dist-trick 1.0) raised in import"
    assert "pkg_trick/trick.py:2" in str(error.where)
    assert shown in str(error.where)
    assert "\x1b" not in str(error)
    assert "importlib" not in str(error.where)
    assert "pkg_trick.trick" not in sys.modules


def test_advice_for_a_missing_module(make_plugin: Make) -> None:
    make_plugin(prelude="import pkg_that_is_absent\n")
    assert "install what provides the module 'pkg_that_is_absent'" in str(raised("trick").fix)


def test_frames_of_the_whole_package_are_own(site, make_plugin: Make) -> None:
    make_plugin(prelude="from pkg_trick.inner.deep import f\nf()\n")
    site.write("pkg_trick/inner/deep.py", "def f():\n    raise OSError('no')\n")
    lines = str(raised("trick").where).splitlines()
    assert lines[0].endswith("pkg_trick/trick.py:2 in <module>")
    assert lines[1].endswith("pkg_trick/inner/deep.py:2 in f")
    assert lines[2].strip() == "OSError: no"


def test_options_that_raise(make_plugin: Make) -> None:
    make_plugin("def build_att", "def model_post_init(self, c):\n        1 / 0\n    def build_att")
    assert raised("trick").hook == "its options"


# Single files


@pytest.mark.parametrize("way", ["{0}/evil.py:Trick", "./evil.py:Trick", "{0}/evil.py", "../x"])
@pytest.mark.parametrize("named", [lambda text: [text], lambda text: {"evil": text}])
def test_text_is_never_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, named: Callable[[str], Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w')\nclass Trick: ...\n")
    with pytest.raises(ConfigError, match="cannot be a plugin's name"):
        load(named(way.format(tmp_path)))
    assert not (tmp_path / "ran").exists()


def test_a_single_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: str) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "my_trick.py"
    file.write_text(good)
    (one,) = load([FileSpec("./my_trick.py", "Trick")], {"my_trick": {"width": 5}})
    assert (one.name, one.distribution, one.version) == ("my_trick", None, None)
    assert one.source == "./my_trick.py:Trick"
    assert one.plugin.options()["width"] == 5
    file.write_text(good.replace("12", "13"))  # same size, same second
    (again,) = load({"my_trick": FileSpec("./my_trick.py", "Trick")})
    assert again.plugin.options()["width"] == 13
    assert again.digest != one.digest
    assert list(tmp_path.iterdir()) == [file]


def test_what_the_core_says_on_the_way_names_the_plugin(good: str, tmp_path: Path) -> None:
    file = tmp_path / "my_trick.py"
    file.write_text(good)
    (one,) = load([FileSpec(str(file), "Trick")], {"my_trick": {"layers": [7]}})
    said = pytest.raises(PlanError, match="plugin 'my_trick': layer 7 is outside the model")
    with said, one.contain("build_model"):
        one.plugin.layers.resolve(2)  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match="my_trick wants") as named, one.contain("build_model"):
        raise PlanError("my_trick wants more")
    assert named.value.what == "my_trick wants more"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("./absent.py:Trick", "there is no file ./absent.py"),
        ("./my_trick.py:Tricks", "class Tricks: its module defines no class Tricks"),
    ],
)
def test_a_single_file_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: str, spec: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_trick.py").write_text(good)
    assert reason in refused(spec).what


def test_a_misnamed_class_is_answered_with_those_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_trick.py").write_text(f"{good}\n\nclass Aside:\n    pass\n")
    fix = str(refused("./my_trick.py:Tricks").fix)
    assert fix.startswith("use ./my_trick.py:Trick; or, in the file: class Tricks(Plugin, api=")
    Path("my_trick.py").write_text("class Aside:\n    pass\n")
    assert str(refused("./my_trick.py:Trick").fix).startswith("in the file: class Trick(Plugin")


def test_a_file_that_was_named_as_if_it_were_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("zqx_trick.py").write_text(good)
    assert str(refused("zqx_trick").fix).endswith("--plugins ./zqx_trick.py:Trick")
    Path("zqx_trick.py").write_text("x = = 1")
    assert "minillm plugins list" in str(refused("zqx_trick").fix)


@pytest.mark.parametrize(
    ("default", "kind"), [("2.5", "float"), ("12", "int"), ("True", "bool"), ("()", "TYPE")]
)
def test_an_option_without_a_type_is_refused_unimported(
    make_plugin: Make, tmp_path: Path, good: str, default: str, kind: str
) -> None:
    old, new = "width: int = option(12", f"width = option({default}"
    file = tmp_path / "my_trick.py"
    file.write_text("raise SystemExit\n" + good.replace(old, new))
    error = refused(f"{file}:Trick")
    assert error.exit_code == 2
    assert error.what.endswith("option 'width' states no type (line 14)")
    assert error.fix == f"width: {kind} = option(...)"
    make_plugin(old, new, prelude="raise SystemExit\n")
    assert f"(line 14): width: {kind} = option(...)" in refused("trick").what


def test_a_single_file_that_raises(tmp_path: Path, good: str) -> None:
    file = tmp_path / "my_trick.py"
    for text, line in ((f"{good}\nraise RuntimeError('late')", 19), ("x = = 1", 1)):
        file.write_text(text)
        error = raised(f"{file}:Trick")
        assert f"my_trick.py:{line}" in str(error.where)
        assert "correct the file" in str(error.fix)
        assert "minillm_file_my_trick" not in sys.modules


# Backends and devices


@pytest.mark.parametrize(
    ("keywords", "backend", "device", "reason"),
    [
        ('backends=("torch",)', "mlx", "gpu", "backend mlx: only on torch"),
        ('devices=("cuda", "mps")', "torch", "cpu", "device cpu: only on cuda, mps"),
        ('backends=("mlx",)', "torch", "cuda:1", "backend torch"),
    ],
)
def test_what_cannot_run_there_is_refused(
    make_plugin: Make, keywords: str, backend: str, device: str, reason: str
) -> None:
    make_plugin("api=1", f"api=1, {keywords}")
    with pytest.raises(PluginError, match=reason):
        check_support(load(["trick"]), backend, device)


@pytest.mark.parametrize(
    ("capability", "gpus", "device", "reason"),
    [
        (
            "==9.0",
            [(8, 0), (8, 6)],
            "cuda",
            "compute capability 9.0, and this machine has 8.0, 8.6",
        ),
        ("==9.0", [(10, 0)], "cuda:0", "compute capability 9.0, and this machine has 10.0"),
        (">=8.9", [(8, 6)], "cuda", "compute capability 8.9 or later, and this machine has 8.6"),
        ("==9.0", [(8, 0), (9, 0)], "cuda", None),  # the run may be on either
        (">=8.9", [(8, 9)], "cuda", None),
        (">=8.9", [(10, 0)], "cuda", None),
        ("==9.0", [], "cuda", None),  # a plan for another machine
        ("==9.0", [(0, 0)], "cuda", None),  # a driver that does not say
        ("==9.0", [(8, 0)], "cpu", None),
    ],
)
def test_a_gpu_of_another_capability_is_refused(
    make_plugin: Make,
    monkeypatch: pytest.MonkeyPatch,
    capability: str,
    gpus: list[tuple[int, int]],
    device: str,
    reason: str | None,
) -> None:
    make_plugin("api=1", f'api=1, capability="{capability}"')
    monkeypatch.setattr(install, "gpu_capabilities", lambda: tuple(gpus))
    with pytest.raises(PluginError, match=reason) if reason else nullcontext():
        check_support(load(["trick"]), "torch", device)


def test_what_can_run_there_passes(make_plugin: Make) -> None:
    make_plugin("api=1", 'api=1, backends=("torch",), devices=("cuda",)')
    make_plugin(name="any")
    check_support(load(["trick", "any"]), "torch", "cuda:1")
    check_support(load(["any"]), "mlx", "gpu")


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        ("no-such-thing", "it is not installed"),
        ("pytest>=9999", "here is "),
        ("pytest>", "this is not a requirement"),
    ],
)
def test_what_a_plugin_requires_is_there_before_a_run(
    make_plugin: Make, need: str, reason: str
) -> None:
    make_plugin("api=1", f'api=1, requires=("numpy>=1", "{need}")')
    with pytest.raises(PluginError, match="needs") as error:
        check_support(load(["trick"]), "torch", "cpu")
    assert f"{need}: {reason}" in error.value.what
    assert "numpy" not in str(error.value)
    fix = error.value.fix or ""
    assert f"'{need}'" in fix or need in fix


def test_what_is_there_is_not_asked_for(make_plugin: Make) -> None:
    make_plugin("api=1", 'api=1, requires=["pytest>=1", "numpy"]')
    check_support(load(["trick"]), "torch", "cpu")


# Calling


def test_each_is_called_with_its_own_arguments_in_order(make_plugin: Make) -> None:
    names = [make_plugin(name=name) for name in ("two", "one")]
    manager = Manager(load(names, {"two": {"width": 2}}))
    given: dict[str, list[int]] = {"one": [], "two": []}
    called: list[str] = []

    def arguments(one: LoadedPlugin) -> dict:
        called.append(one.name)
        return {"attn": given[one.name]}

    manager.call("build_attention", arguments)
    assert called == ["one", "two"]
    assert given == {"one": [12], "two": [2]}
    assert [one.name for one in manager.implementing("build_attention")] == ["one", "two"]
    manager.call("build_model", lambda one: {})


def test_what_a_hook_returns_would_be_lost(make_plugin: Make) -> None:
    make_plugin("attn.append(self.width)", "return attn")
    with pytest.raises(
        PluginError, match=r"'trick' \(dist-trick 1.0\): build_attention returned list"
    ):
        Manager(load(["trick"])).call("build_attention", lambda one: {"attn": []})


def test_an_argument_may_be_left_out(make_plugin: Make) -> None:
    make_plugin("build_attention(self, attn)", "on_batch(self, phase)")
    make_plugin("attn.append(self.width)", "...", name="other")
    manager = Manager(load(["trick", "other"]))
    with pytest.raises(PluginCodeError, match="raised in on_batch"):  # attn is not defined there
        manager.call("on_batch", lambda one: {"batch": {}, "phase": "train"})


def test_no_plugin_no_call() -> None:
    manager = Manager()
    assert manager.plugins == ()
    manager.call("on_event", lambda one: {"event": None})


def test_what_the_core_answers_passes_with_its_place(make_plugin: Make) -> None:
    make_plugin()
    manager = Manager(load(["trick"]))

    class Builder:
        def append(self, width: int) -> None:
            raise PlanError("taken")

    with pytest.raises(PlanError, match="taken") as error:
        manager.call("build_attention", lambda one: {"attn": Builder()})
    assert error.value.where == "plugin 'trick', build_attention, of dist-trick 1.0"


@pytest.mark.parametrize(
    "statement", ["1 / 0", "raise SystemExit(0)", "raise KeyboardInterrupt", "raise GeneratorExit"]
)
def test_a_hook_that_raises(make_plugin: Make, statement: str) -> None:
    make_plugin("attn.append(self.width)", statement)
    manager = Manager(load(["trick"]))
    for _ in range(2):
        with pytest.raises(
            PluginCodeError, match=r"'trick' \(dist-trick 1.0\) raised in build_attention"
        ) as error:
            manager.call("build_attention", lambda one: {"attn": []})
        assert "in build_attention" in str(error.value.where)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


INTERRUPT = "import signal; signal.raise_signal(signal.SIGINT)"


def test_a_real_interrupt_passes(make_plugin: Make) -> None:
    make_plugin("attn.append(self.width)", INTERRUPT)
    manager = Manager(load(["trick"]))
    with pytest.raises(KeyboardInterrupt):
        manager.call("build_attention", lambda one: {"attn": []})
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_runs_own_handler_is_heard(make_plugin: Make) -> None:
    make_plugin("attn.append(self.width)", INTERRUPT)
    manager = Manager(load(["trick"]))
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        manager.call("build_attention", lambda one: {"attn": []})
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_in_another_thread_every_interrupt_is_the_plugins(make_plugin: Make) -> None:
    make_plugin("attn.append(self.width)", "raise KeyboardInterrupt")
    manager = Manager(load(["trick"]))
    seen: list[BaseException] = []

    def work() -> None:
        try:
            manager.call("build_attention", lambda one: {"attn": []})
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert isinstance(seen[0], PluginCodeError)


def test_a_plugin_made_in_python(make_plugin: Make) -> None:
    make_plugin()
    options: dict[str, Any] = {"width": 7}
    plugin = find("trick").cls(**options)
    one = LoadedPlugin.of("mine", plugin)
    assert (one.name, one.distribution) == ("mine", None)
    assert one.source.endswith(":Trick")
    given: list[int] = []
    Manager([one]).call("build_attention", lambda _: {"attn": given})
    assert given == [7]
    with pytest.raises(PluginError, match="named twice"):
        Manager([one, one])
