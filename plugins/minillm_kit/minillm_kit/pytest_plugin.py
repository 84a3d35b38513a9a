"""The kit's pytest plugin: one test per check, two flags, a fixture, and a line with the backends found.

pytest imports this file in every run if the kit is installed, whatever is tested, so it imports
nothing else until a test uses it.
"""

from __future__ import annotations

import logging
import os
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from minillm_kit.runner import Checking

BACKENDS = ("torch", "mlx")

TORCHS_OWN = (".*should not be instantiated", ".torch.jit.script_method. is deprecated")
"""Warnings of torch about its own code during compilation; with ``-W error`` no plugin could pass."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--minillm-backend`` and ``--minillm-pairs``."""
    group = parser.getgroup("minillm", "minillm's conformance tests")
    group.addoption(
        "--minillm-backend",
        choices=("both", *BACKENDS),
        help="framework to check plugins on (default: the test's own, else both)",
    )
    group.addoption(
        "--minillm-pairs",
        metavar="N|all",
        type=_count,
        help="number of other plugins that each is paired with (default: 5)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise tests that use ``minillm_backend`` over the backends."""
    if "minillm_backend" in metafunc.fixturenames:
        asked = metafunc.config.getoption("minillm_backend")
        chosen = (asked,) if asked in BACKENDS else BACKENDS
        metafunc.parametrize("minillm_backend", chosen, indirect=True)


@pytest.fixture
def minillm_backend(request: pytest.FixtureRequest) -> str:
    """Return the backend to test on: each in turn, skipped if it is not installed."""
    if missing := _missing(request.param):
        pytest.skip(missing)
    return request.param


def pytest_report_collectionfinish(items: Sequence[pytest.Item]) -> list[str]:
    """Report the backends that plugins are checked on, if conformance tests are collected."""
    found = {getattr(getattr(item, "function", None), "checks_plugin", None) for item in items}
    plugins = sorted(filter(None, found))
    if not plugins:
        return []
    from importlib.metadata import version

    on = [_missing(name) or f"{name} {version(name)}" for name in BACKENDS]
    return [f"minillm {version('minillm-core')}: {', '.join(plugins)} on {', '.join(on)}"]


def _missing(backend: str) -> str | None:
    from minillm_core.inspection import probe

    framework = getattr(probe(), backend)
    if framework is None:
        return f"{backend} is not installed"
    return f"{backend} cannot be imported: {framework.broken}" if framework.broken else None


def _count(text: str) -> int | str:
    if text == "all":
        return text
    if not (text.isascii() and text.isdigit()):
        raise ArgumentTypeError(f"a number or 'all', not '{text}'")
    return int(text)


def conformance(
    spec: str,
    options: Mapping[str, Any] | None = None,
    *,
    backend: str = "both",
    pairs: int | None = 5,
) -> Callable[..., None]:
    """Return a test function that runs every check of a plugin, each as a separate test.

    ::

        test_contract = conformance("my_trick")

    ``pytest -k decodes`` runs one of them; ``--minillm-backend`` and ``--minillm-pairs``
    override the arguments here. A check that does not apply is skipped with its reason, and so is
    one that depends on a check that failed before it in the same process: with pytest-xdist, keep a
    file's tests together (``--dist loadfile``).

    Args:
        spec: the plugin's name, or a file and its class.
        options: its options, if not the defaults.
        backend: ``torch``, ``mlx`` or ``both``.
        pairs: number of other plugins to pair it with; None: all.
    """
    from minillm_kit.runner import CHECKS, Checking, explained
    from minillm_kit.subject import Subject

    @cache
    def checking(backend: str, pairs: int | None) -> Checking:
        return Checking(Subject(spec, options, backend=backend, pairs=pairs))

    ignored = [f"ignore:{text}:DeprecationWarning" for text in TORCHS_OWN]

    @pytest.mark.filterwarnings(*ignored)
    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
    def test_contract(check: Any, request: pytest.FixtureRequest) -> None:
        with _quiet():
            result = checking(*requested(request.config, backend, pairs)).result(check)
        if result.outcome.verdict == "failed":
            pytest.fail(explained(result, again=_again(request)), pytrace=False)
        if result.outcome.verdict != "passed":
            pytest.skip(f"{result.outcome.verdict}: {result.outcome.found}")

    test_contract.checks_plugin = spec  # type: ignore[attr-defined]  # read when tests are collected
    return test_contract


def requested(config: pytest.Config, backend: str, pairs: int | None) -> tuple[str, int | None]:
    """Return the backend and number of pairs: pytest's flags, else the test's own."""
    flags = [config.getoption(f"--minillm-{flag}", None) for flag in ("backend", "pairs")]
    beside = {None: pairs, "all": None}.get(flags[1], flags[1])
    return flags[0] or backend, beside


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's trace, hundreds of lines per compilation, out of pytest's report."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def _again(request: pytest.FixtureRequest) -> str:
    """Return the command that runs this test alone."""
    path, *names = str(request.node.nodeid).split("::")
    here = os.path.relpath(request.config.rootpath / path, request.config.invocation_params.dir)
    words = ["::".join((here, *names))]
    if backend := request.config.getoption("--minillm-backend", None):
        words += ["--minillm-backend", backend]
    return shlex.join(["python", "-m", "pytest", *words])
