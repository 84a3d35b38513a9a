"""Script run by ``minillm doctor``: import MLX, test it, print the results as JSON.

It runs in a separate process and imports nothing else of minillm, so that a crash or hang of MLX does
not affect the command.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

SIZE = 512  # of the timed matrix product: 60 ms on the reference BLAS


def facts() -> dict[str, Any]:
    """Collect what MLX supports on this machine, as JSON."""
    import mlx.core as mx

    gpu = next((kind for kind in ("metal", "cuda") if _available(mx, kind)), None)
    version = getattr(mx, "__version__", "?")
    found: dict[str, Any] = {"version": version, "gpu": gpu, "device": _name(mx, gpu)}
    if sys.platform == "linux":
        found["gflops"] = _speed(mx)
        found["blas"] = _fast_blas()
    return found


def _available(mx: Any, kind: str) -> bool:
    module = getattr(mx, kind, None)
    return module is not None and bool(module.is_available())


def _name(mx: Any, gpu: str | None) -> str:
    if gpu is None:
        return "cpu"
    about = getattr(mx, "device_info", None) or getattr(mx.metal, "device_info", dict)
    return str(about().get("device_name", gpu))


def _speed(mx: Any) -> float:
    """Measure the GFLOP/s of a float32 matrix product on the CPU."""
    with mx.stream(mx.cpu):
        a = mx.ones((SIZE, SIZE))
        mx.eval(a @ a)  # loads libraries before timing
        start = time.perf_counter()
        mx.eval(a @ (a + 1))
    return 2 * SIZE**3 / (time.perf_counter() - start) / 1e9


def _fast_blas() -> str | None:
    """Find an optimised BLAS among this process's libraries; None: the wheel's reference BLAS."""
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"/lib(openblas|mkl_rt|blis)[^/\n]*$", maps, re.MULTILINE)
    return found[1] if found else None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(facts()))
