"""A script of benchmarks/, run by name in a process that is forked from one with the program's imports."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

IMPORTED = (
    *("minillm_core.cli.main", "minillm_core.cli.train", "minillm_core.train.session"),
    *("minillm_core.backends.torch.backend", "minillm_core.backends.mlx.backend"),
    *("minillm_hf.directory", "minillm_lab.speeds"),
)
"""What a run imports: each script does that twice, in its first run and to fork the others."""


def main(arguments: Sequence[str]) -> None:
    """Run the script that the first argument names, with the others, as ``python -m benchmarks.NAME`` would."""
    sys.argv = [*arguments]
    sys.exit(import_module(f"benchmarks.{arguments[0]}").main())
