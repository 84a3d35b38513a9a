"""Processes that train together, started in milliseconds: what tests of several ranks share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from minillm_kit import fresh

SECONDS = 700.0
"""Until processes are killed that do not end, which forked.py has tried before."""

IMPORTED = (
    *("numpy", "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("torch._dynamo.backends.debugging", "torch._inductor.lowering"),  # what compiling imports
    *("minillm_core.cli.main", "minillm_core.cli.train", "minillm_core.inspection"),
    *("minillm_core.train.session", "minillm_core.backends.torch.backend"),
    *("minillm_hf.directory", "minillm_lab.speeds"),
    *("minillm_mesh.torch_ranks", "minillm_mesh.torch_weights", "minillm_mesh.pipeline"),
    *(
        "minillm_modded.moe",
        "minillm_muon.muon",
        "minillm_optim.adam8bit",
        "minillm_data.shuffle_rows",
    ),
)
"""What ranks import, so that each need not."""


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which stepped.py keeps what a process has trained alone; workers of pytest-xdist share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "references"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def processes(references: Path) -> Callable[..., str]:
    """``processes(2, "stepped", "torch", ...)``: run a module of this folder, or an installed one, in some processes.

    They are forked (see forked.py) and run to their ends, or, where ``stop="STEP:OUT"`` is given, get SIGTERM once
    the run in OUT has made that many steps. What they said is returned, or is the message where the exit code of
    the process that failed first is not ``code``.
    """
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[2])])  # of these modules, and of tools
    own = {"PYTHONPATH": path, "REFERENCES": str(references)}

    def run(size: int, module: str, *arguments: str, code: int = 0, stop: str = "") -> str:
        ended = fresh.run(
            "forked",
            *(f"{size}@{stop}" if stop else str(size), module, *arguments),
            environment={**os.environ, "OMP_NUM_THREADS": "1", **own},
            seconds=SECONDS,
            imported=IMPORTED,
        )
        said = ended.stdout + ended.stderr
        assert ended.code == code, said
        return said

    return run
