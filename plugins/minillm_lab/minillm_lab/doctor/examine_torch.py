"""Script run by ``minillm doctor``: import torch, test its devices, print the results as JSON.

It runs in a separate process and imports nothing else of minillm, so that a crash or hang of torch
does not affect the command.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

SIZE = 512  # of the timed matrix products: 7 ms in float32 on a core of 40 GFLOP/s


def facts() -> dict[str, Any]:
    """Collect what torch supports on this machine, as JSON."""
    import torch

    with warnings.catch_warnings(record=True) as caught:  # e.g. why CUDA cannot start
        warnings.simplefilter("always")
        found = torch.cuda.is_available()
        devices = [_device(torch, index) for index in range(torch.cuda.device_count() * found)]
    float(torch.ones(2).sum())
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": devices,
        "architectures": torch.cuda.get_arch_list() if found else [],
        "mps": torch.backends.mps.is_available(),
        "threads": torch.get_num_threads(),
        "warnings": [str(one.message) for one in caught],
        "bfloat16": None if devices else _seconds(torch, "float32") / _seconds(torch, "bfloat16"),
    }


def _seconds(torch: Any, dtype: str) -> float:
    """Measure a matrix product on the CPU: the fastest of three, after one that loads libraries."""
    a = torch.ones(SIZE, SIZE, dtype=getattr(torch, dtype))
    times = []
    for _ in range(4):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _device(torch: Any, index: int) -> dict[str, Any]:
    about = torch.cuda.get_device_properties(index)
    found = {
        "name": about.name,
        "capability": f"{about.major}.{about.minor}",
        "bytes": about.total_memory,
    }
    try:
        float(torch.ones(2, device=f"cuda:{index}").sum())
    except RuntimeError as error:  # no kernel for this card, or another process holds it
        found["error"] = str(error).splitlines()[0]
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(facts()))
