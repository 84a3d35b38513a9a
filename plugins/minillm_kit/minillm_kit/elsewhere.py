"""The logits of an exported directory in Transformers, by the modeling file in it, without minillm.

    python -B -m minillm_kit.elsewhere DIR     DIR/ids.npy (T,) -> DIR/logits.npy (T, V)

The file is imported by its path: nothing of it is copied to a cache, and nothing is fetched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core.commands import plain
from minillm_kit import fresh
from minillm_kit.check import Failed

PATIENCE = 180
"""Timeout in seconds, generous for a busy machine."""

IMPORTED = ("torch", "transformers", "transformers.modeling_utils", "transformers.generation")
"""What its process has imported before, once for all plugins."""

BROKEN = "the modeling file that minillm-hf writes of this plugin's source: tell its authors"


def logits_elsewhere(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Compute the logits (T, V) of ``ids`` (T,) by a directory's own modeling file, in another process.

    Raises:
        Failed: it could not be loaded, or raised.
    """
    np.save(folder / "ids.npy", ids)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        ended = fresh.run(
            "minillm_kit.elsewhere",
            str(folder),
            environment=environment,
            seconds=PATIENCE,
            imported=IMPORTED,
        )
    except TimeoutError:
        raise Failed(f"not done after {PATIENCE} seconds", cause=BROKEN) from None
    if ended.code:
        last = plain((ended.stderr.strip().splitlines() or ["no output"])[-1])
        raise Failed(f"without minillm its modeling file raises: {last}", cause=BROKEN)
    return np.load(folder / "logits.npy")


class _Absent:
    """An import finder that blocks minillm."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise for modules of minillm."""
        if name.partition(".")[0].startswith("minillm"):
            raise ImportError(f"{name} is not here")


def _without_minillm(modules: Mapping[str, Any]) -> None:
    """Make minillm impossible to import in this process."""
    for name in [one for one in modules if one.partition(".")[0].startswith("minillm")]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Absent())  # type: ignore[arg-type]


def main(arguments: Sequence[str]) -> None:
    """Write the logits of a directory."""
    import torch

    (folder,) = map(Path, arguments)
    _without_minillm(sys.modules)
    spec = spec_from_file_location("modeling_minillm", folder / "modeling_minillm.py")
    assert spec is not None
    assert spec.loader is not None
    modeling = sys.modules[spec.name] = module_from_spec(spec)
    with redirect_stdout(sys.stderr), torch.no_grad():
        spec.loader.exec_module(modeling)
        model = modeling.MinillmForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.from_numpy(np.load(folder / "ids.npy").astype(np.int64))
        np.save(folder / "logits.npy", model(ids[None]).logits[0].numpy())


if __name__ == "__main__":
    main(sys.argv[1:])
