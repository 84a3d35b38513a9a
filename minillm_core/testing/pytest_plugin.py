"""What the kit adds to pytest: two flags, a fixture, and a line with the backends that were found.

pytest imports this file in every run where minillm is installed, whatever is tested there: it
imports nothing until a test of the kit asks for something.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Sequence

import pytest

__all__ = ["minillm_backend"]

BACKENDS = ("torch", "mlx")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--minillm-backend`` and ``--minillm-pairs``."""
    group = parser.getgroup("minillm", "minillm's conformance tests")
    group.addoption(
        "--minillm-backend",
        choices=("both", *BACKENDS),
        help="the framework to check plugins on (default: what the test says, else both)",
    )
    group.addoption(
        "--minillm-pairs",
        metavar="N|all",
        type=_count,
        help="how many other plugins each is paired with (default: 5)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``minillm_backend`` is run on each."""
    if "minillm_backend" in metafunc.fixturenames:
        asked = metafunc.config.getoption("minillm_backend")
        chosen = (asked,) if asked in BACKENDS else BACKENDS
        metafunc.parametrize("minillm_backend", chosen, indirect=True)


@pytest.fixture
def minillm_backend(request: pytest.FixtureRequest) -> str:
    """A backend to test on: each in turn, skipped where it is not installed."""
    if missing := _missing(request.param):
        pytest.skip(missing)
    return request.param


def pytest_report_collectionfinish(items: Sequence[pytest.Item]) -> list[str]:
    """The backends that plugins are checked on, where there are conformance tests."""
    found = {getattr(getattr(item, "function", None), "checks_plugin", None) for item in items}
    plugins = sorted(filter(None, found))
    if not plugins:
        return []
    from importlib.metadata import version

    on = [_missing(name) or f"{name} {version(name)}" for name in BACKENDS]
    return [f"minillm {version('minillm-core')}: {', '.join(plugins)} on {', '.join(on)}"]


def _missing(backend: str) -> str | None:
    from minillm_core.backends.detect import probe

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
