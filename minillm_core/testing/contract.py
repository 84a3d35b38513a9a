"""The kit under pytest: one test a check."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from minillm_core.testing.registry import CHECKS
from minillm_core.testing.rerun import PAIRS
from minillm_core.testing.runner import Checking, explained
from minillm_core.testing.subject import Subject

if TYPE_CHECKING:
    import pytest

__all__ = ["conformance"]

TORCHS_OWN = (".*should not be instantiated", ".torch.jit.script_method. is deprecated")
"""What torch warns of itself while it compiles; with ``-W error`` no plugin could pass."""


def conformance(
    spec: str,
    options: Mapping[str, Any] | None = None,
    *,
    backend: str = "both",
    pairs: int | None = PAIRS,
) -> Callable[..., None]:
    """A test function that runs every check of a plugin, each as a test of its own.

    ::

        test_contract = conformance("my_trick")

    ``pytest -k decodes`` runs one of them; ``--minillm-backend`` and ``--minillm-pairs`` take the
    place of what is given here. A check that does not apply is skipped with its reason, and so is
    one that builds on a check that failed before it in the same process: with pytest-xdist, keep a
    file's tests together (``--dist loadfile``).

    Args:
        spec: the plugin's name, or a file and its class.
        options: its options, where not the defaults.
        backend: ``torch``, ``mlx`` or ``both``.
        pairs: how many other plugins it is paired with; None: all.
    """
    import pytest

    @cache
    def checking(backend: str, pairs: int | None) -> Checking:
        return Checking(Subject(spec, options, backend=backend, pairs=pairs))

    ignored = [f"ignore:{text}:DeprecationWarning" for text in TORCHS_OWN]

    @pytest.mark.filterwarnings(*ignored)
    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
    def test_contract(check: Any, request: pytest.FixtureRequest) -> None:
        with _quiet():
            result = checking(*asked(request.config, backend, pairs)).result(check)
        if result.outcome.verdict == "failed":
            pytest.fail(explained(result, again=_again(request)), pytrace=False)
        if result.outcome.verdict != "passed":
            pytest.skip(f"{result.outcome.verdict}: {result.outcome.found}")

    test_contract.checks_plugin = spec  # type: ignore[attr-defined]  # read when tests are collected
    return test_contract


def asked(config: pytest.Config, backend: str, pairs: int | None) -> tuple[str, int | None]:
    """The backend and number of pairs: the test's own, unless pytest's flags say otherwise."""
    flags = [config.getoption(f"--minillm-{flag}", None) for flag in ("backend", "pairs")]
    beside = {None: pairs, "all": None}.get(flags[1], flags[1])
    return flags[0] or backend, beside


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's trace, hundreds of lines for each compilation, out of what pytest reports."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def _again(request: pytest.FixtureRequest) -> str:
    """The command that runs this test alone."""
    path, *names = str(request.node.nodeid).split("::")
    here = os.path.relpath(request.config.rootpath / path, request.config.invocation_params.dir)
    words = ["::".join((here, *names))]
    if backend := request.config.getoption("--minillm-backend", None):
        words += ["--minillm-backend", backend]
    return shlex.join(["python", "-m", "pytest", *words])
