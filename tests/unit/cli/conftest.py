from __future__ import annotations

from collections.abc import Callable

import pytest

from minillm_core.cli.main import main


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the program here: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run
