"""What the tests of the core and of every plugin share: the program, a small model, environments.

MLX's wheel for Linux bundles the reference BLAS (4 GFLOP/s on one core). libmlx looks three
symbols up when it is loaded, so a shim that was loaded before it may answer with those of the
``scipy-openblas32`` wheel, some 25 times as fast. Without gcc or the wheel, tests run on the
bundled one.

On a CPU MLX compiles each fused operation by ``g++``, which spends four fifths of its time on one
header. A precompiled form of that header beside it makes that 0.12 CPU seconds instead of 0.55.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from venv import EnvBuilder

import pytest
from hypothesis import HealthCheck, settings
from packaging.requirements import Requirement

from minillm_core.cli.main import main
from minillm_core.config.load import load
from minillm_core.config.schema import Config
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.plugin import Plugin
from tools.release import ROOT, build, distributions
from tools.tutorial import run_page

# No deadline: the first example often compiles or imports something, and machines differ.
settings.register_profile(
    "minillm", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("minillm")

ROUTINES = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
JUMP = {"x86_64": "jmp scipy_{0}@PLT", "aarch64": "b scipy_{0}"}
BLAS = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Restore signals that the starting shell ignores, and load the BLAS before MLX."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what ends in "&"
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # so nohup starts what it starts
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.stash[BLAS] = "bundled with MLX" if "mlx.core" in sys.modules else _openblas()
    if not hasattr(config, "workerinput"):  # before the workers start
        _precompile()
    # torch complains of itself: where torch.compile makes an instance of every autograd.Function
    # that it traces, and where Inductor is imported.
    for warning in (".*should not be instantiated", ".torch.jit.script_method. is deprecated"):
        config.addinivalue_line("filterwarnings", f"ignore:{warning}:DeprecationWarning")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while tests are collected: next to all that is made then stays."""
    gc.disable()
    yield
    gc.enable()


ROTATING, TURNS = ("clean", "compiles", "exports", "mesh", "pairs"), 6
"""Checks that take most of a plugin's time, and the number of turns in which the plugins have them."""

LONG = ("test_contract.py", "test_wrong_plugins.py", "test_torch_ranks.py", "test_context.py")
"""Files that take minutes in the full tier, beside those of tests/integration."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take minutes: a worker that gets one last works on when others are done.

    Tests marked nightly are deselected, unless -m names that marker. Of a test marked broad(n), n cases, evenly
    spaced, stay in the fast tier; the others are slow. With -m a sixth of the plugins have the checks ``ROTATING``,
    and which sixth depends on the commit; -m nightly has the others.
    """
    for one in _of_other_turns(items) if config.option.markexpr else ():
        one.add_marker("nightly")
    if "nightly" not in config.option.markexpr:
        left = [one for one in items if one.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left)
        items[:] = [one for one in items if not one.get_closest_marker("nightly")]
    for one in _beyond(items):
        one.add_marker("slow")
    items.sort(key=lambda one: not (one.path.name in LONG or one.path.parent.name == "integration"))


def _beyond(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases of tests marked broad(n) that are none of the n, evenly spaced."""
    cases: dict[str, list[pytest.Item]] = {}
    keep: dict[str, int] = {}
    for one in items:
        marker, test = one.get_closest_marker("broad"), one.nodeid.partition("[")[0]
        if marker and not one.get_closest_marker("slow"):
            cases.setdefault(test, []).append(one)
            keep[test] = marker.args[0]
    for test, found in cases.items():
        count = min(keep[test], len(found))
        kept = {round(i * len(found) / count) for i in range(count)}
        yield from (one for number, one in enumerate(found) if number not in kept)


def _of_other_turns(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the rotating checks of plugins that have them at other commits."""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    turn = int(asked.stdout or "0", 16) % TURNS  # 0 outside of a repository
    plugins: dict[str, list[pytest.Item]] = {}
    for one in items:
        if hasattr(getattr(one, "function", None), "checks_plugin"):
            plugins.setdefault(one.nodeid.partition("[")[0], []).append(one)
    rotating = tuple(f"[{check}]" for check in ROTATING)
    for number, name in enumerate(sorted(plugins)):
        if number % TURNS != turn:
            yield from (one for one in plugins[name] if one.nodeid.endswith(rotating))


def pytest_report_header(config: pytest.Config) -> str:
    """Name the BLAS that MLX uses."""
    return f"BLAS of MLX: {config.stash[BLAS]}"


@pytest.fixture(scope="session")
def check_on_gpu() -> Callable[..., None]:
    """Return a comparison of a kernel's outputs and gradients with the plain one in float64, by its contract.

    ``check(op, kernel, arrays, *rest, dtype="bfloat16", **named)``: the arrays are differentiable.
    """
    import torch

    from minillm_core.backends.candidates import TORCH
    from minillm_core.ops.contract import CONTRACTS

    def check(
        op: str, kernel: Any, arrays: list[Any], *rest: Any, dtype: str = "bfloat16", **named: Any
    ) -> None:
        (plain,) = (c.load() for c in TORCH if c.op == op and c.plain)
        rounded = [x.cuda().to(getattr(torch, dtype)) for x in arrays]
        results = []
        for function, given in ((kernel, rounded), (plain, [x.double() for x in rounded])):
            given = [x.detach().requires_grad_() for x in given]
            outputs = function(*given, *rest, **named)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            free = [y for y in outputs if y.requires_grad]
            torch.manual_seed(1)
            up = [torch.randn(y.shape, device=y.device).to(y.dtype) for y in free]
            grads = torch.autograd.grad(free, given, up)
            results.append([x.detach().double() for x in (*outputs, *grads)])
        for got, exact in zip(*results, strict=True):
            limit = max(exact.norm().item(), exact.numel() ** 0.5)
            assert (got - exact).norm().item() <= CONTRACTS[op].tolerance[dtype] * limit

    return check


def _openblas() -> str:
    """Load the shim into this process; returns what MLX will use, and why not the faster one."""
    jump, gcc = JUMP.get(platform.machine()), shutil.which("gcc")
    if sys.platform != "linux" or jump is None:
        return "the platform's own"
    if gcc is None:
        return "bundled reference (slow): no gcc to build a shim to OpenBLAS"
    try:
        import scipy_openblas32 as openblas
    except ImportError:
        return "bundled reference (slow): no scipy-openblas32 wheel"
    lines = (f".globl {r}\\n{r}: {jump.format(r)}\\n" for r in ROUTINES)
    source = "".join(f'__asm__("{line}");\n' for line in lines)
    library = Path(openblas.get_lib_dir()) / f"lib{openblas.get_library()}.so"
    with tempfile.TemporaryDirectory() as folder:
        shim = Path(folder) / "shim.so"
        command = [gcc, "-shared", "-fPIC", "-x", "c", "-", "-o", str(shim)]
        try:
            subprocess.run(command, input=source, text=True, check=True, capture_output=True)
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL)
        except (OSError, subprocess.CalledProcessError) as error:
            return f"bundled reference (slow): the shim to OpenBLAS failed: {error}"
    return f"OpenBLAS of scipy-openblas32 {openblas.__version__}"


def _precompile() -> None:
    """Precompile the header of MLX's fused operations, unless that was done in this environment."""
    found = importlib.util.find_spec("mlx")
    if sys.platform != "linux" or found is None or shutil.which("g++") is None:
        return
    for folder in found.submodule_search_locations or ():
        header = Path(folder, "include", "mlx", "backend", "cpu", "compiled_preamble.h")
        made = header.with_name(header.name + ".gch")
        if not header.is_file() or made.exists() or not os.access(header.parent, os.W_OK):
            continue
        part = made.with_name(f"{made.name}.{os.getpid()}")
        # the flags of MLX's own command: g++ ignores a header that was compiled with others
        flags = ("-std=c++17", "-O3", "-Wall", "-fPIC", "-w", "-x", "c++-header")
        command = ["g++", *flags, "-I", str(Path(folder, "include")), str(header), "-o", str(part)]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            part.replace(made)
        part.unlink(missing_ok=True)


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Keep all that is there when a file of tests begins out of the garbage collector's sight.

    Imported modules, collected tests and reports are half a million objects, and more with every test.
    Python walks over them again and again; so does a study, which collects before each run.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return Path(__file__).parent


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the program here: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="session")
def run_commands() -> Callable[..., int]:
    """Run the commands of a page in a folder; return their number. Only its first minillm is started.

    ``run(page, folder, python, variables, imported)``: an environment's interpreter and variables, and the modules
    that its commands import.
    """

    def run(
        page: str, folder: Path, python: Path, variables: Mapping[str, str], imported: Sequence[str]
    ) -> int:
        if sys.platform != "linux":  # where a fork is not safe
            return run_page(page, folder, variables)
        from tools.forking import Forking  # needs minillm-kit

        with Forking(python, imported, variables) as forking:
            return run_page(page, folder, variables, forking.run)

    return run


# Plugins and plans

Planned = Callable[..., Plan]

SMALL = (
    "model.layers=4",
    "model.dim=32",
    "model.heads=4",
    "model.kv_heads=2",
    "model.hidden=48",
    "model.vocab=64",
    "model.tied=true",
    "train.rows=2",
    "train.seq_len=16",
)

GOOD = '''
from minillm_core.plugins.layers import Layers
from minillm_core.plugins.options import option
from minillm_core.plugins.plugin import Plugin


class Trick(Plugin, api=1):
    """A trick.

    More about it.
    """

    width: int = option(12, ge=1, help="features read")
    layers: Layers = option("all", help="where it goes")

    def build_attention(self, attn):
        attn.append(self.width)
'''


class Site:
    """A site-packages of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, path: str, text: str) -> Path:
        """Write a file below it."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def install(
        self,
        distribution: str,
        points: Mapping[str, str],
        files: Mapping[str, str] | None = None,
        version: str = "1.0",
        group: str = "minillm.plugins",
    ) -> None:
        """Write the metadata of a distribution, its entry points, and its files."""
        info = f"{distribution.replace('-', '_')}-{version}.dist-info"
        lines = "".join(f"{name} = {value}\n" for name, value in points.items())
        self.write(f"{info}/entry_points.txt", f"[{group}]\n{lines}")
        self.write(f"{info}/METADATA", f"Name: {distribution}\nVersion: {version}\n\nLong.\n")
        for path, text in (files or {}).items():
            self.write(path, text)

    def trick(self, name: str, source: str = GOOD, *, point: str | None = None) -> None:
        """Install ``dist-<name>`` with one plugin in ``pkg_<name>/trick.py``."""
        self.install(
            f"dist-{name}",
            {name: point or f"pkg_{name}.trick:Trick"},
            {f"pkg_{name}/__init__.py": "", f"pkg_{name}/trick.py": source},
        )


@pytest.fixture
def good() -> str:
    """The source of a plugin without a fault, class Trick."""
    return GOOD


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty site-packages at the head of the path; what it brings in is forgotten after."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        if name.startswith(("pkg_", "minillm_file_")):
            del sys.modules[name]


@pytest.fixture(scope="session")
def small_config() -> Callable[..., Config]:
    """Settings of a small model, with those given as ``key=value``."""

    def make(*settings: str) -> Config:
        merged = dict(setting.split("=", 1) for setting in (*SMALL, *settings))
        loaded = load(
            preset="tiny",
            assignments=[f"{key}={value}" for key, value in merged.items()],
            default_preset=lambda: ("tiny", "test"),
        )
        return loaded.config

    return make


@pytest.fixture(scope="session")
def planned(small_config: Callable[..., Config]) -> Planned:
    """``planned("train.lr=0.1", gate=Gate())``: a plan, plugins by the names they get."""

    def make(*settings: str, **plugins: Plugin) -> Plan:
        loaded = [LoadedPlugin.of(name, plugin) for name, plugin in plugins.items()]
        return build_plan(small_config(*settings), loaded)

    return make


# Environments


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution -> its wheel, built from the working tree as `make wheels` does; examples too."""
    folders = [*distributions(ROOT, "plugins", "examples")]
    built = build(tmp_path_factory.mktemp("dist"), folders)
    return {name: wheel for name, (_, wheel) in built.items()}


@dataclass(frozen=True)
class Environment:
    """A virtual environment; commands in it see neither the working tree nor this process's settings."""

    folder: Path
    variables: dict[str, str]

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        """Where its packages are installed."""
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def call(self, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run ``python -m arguments``, however it ends."""
        return subprocess.run(
            [self.python, "-m", *arguments],
            cwd=cwd,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )

    def run(self, *arguments: str | Path, cwd: Path) -> str:
        """Return what ``python -m arguments`` prints; it has to end well."""
        done = self.call(*arguments, cwd=cwd)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, *wheels: Path) -> None:
        """Install wheels as they are: what they need is there."""
        # what is imported is compiled then: a part of it
        options = ("--quiet", "--no-index", "--no-deps", "--force-reinstall", "--no-compile")
        self.run("pip", "install", *options, *wheels, cwd=self.folder)


def make(folder: Path, libraries: Path | str | None = None, **variables: str | Path) -> Environment:
    """Make an environment.

    Args:
        folder: its venv, and its cache, go there.
        libraries: a site-packages whose packages it has as well, pip among them; or several, a line each.
        variables: set in it, beside this process's that do not lead back to the working tree.
    """
    venv = folder / "venv"
    EnvBuilder(symlinks=True, with_pip=libraries is None).create(venv)
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("PYTHON", "PYTEST", "MINILLM_")) and k != "VIRTUAL_ENV"
    }
    kept["PATH"] = f"{venv / 'bin'}{os.pathsep}{kept['PATH']}"
    own = {"XDG_CACHE_HOME": folder / "cache", "OMP_NUM_THREADS": "1", **variables}
    made = Environment(venv, kept | {name: str(value) for name, value in own.items()})
    if libraries is not None:
        # Editable installs are .pth files there, which Python reads in its own folders alone.
        (made.site / "libraries.pth").write_text(str(libraries))
        pip = venv / "bin" / "pip"
        pip.write_text(f'#!/bin/sh\nexec {shlex.quote(str(made.python))} -m pip "$@"\n')
        pip.chmod(0o755)
    return made


def link(folder: Path, *requirements: str) -> None:
    """Fill a site-packages with links to distributions of this one: the required ones, and what they require."""
    found: set[tuple[str, str]] = set()
    wanted = [(Requirement(one), "") for one in requirements]
    while wanted:
        one, extra = wanted.pop()
        if one.marker and not one.marker.evaluate({"extra": extra}):
            continue
        distribution = metadata.distribution(one.name)
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))))
        for each in {(one.name, ""), *((one.name, extra) for extra in one.extras)} - found:
            found.add(each)
            wanted += [(Requirement(line), each[1]) for line in distribution.requires or ()]


@pytest.fixture(scope="session")
def link_libraries() -> Callable[..., None]:
    """Fill a site-packages with links: :func:`link`."""
    return link


@pytest.fixture(scope="session")
def make_environment() -> Callable[..., Environment]:
    """Make an environment: :func:`make`."""
    return make


@pytest.fixture
def environment(wheels: dict[str, Path], tmp_path: Path) -> Environment:
    """One that has the wheels of the core, the kit with what it needs, the lab and mesh, and this one's libraries."""
    made = make(tmp_path, libraries=sysconfig.get_path("purelib"))
    made.install(*(wheels[f"minillm-{name}"] for name in ("core", "hf", "kit", "lab", "mesh")))
    return made
