"""Run as a script by ``minillm doctor``: imports MLX, tries it, writes its findings.

It is a process of its own, and imports nothing else of ours, so that an MLX that crashes or hangs
does so alone.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

SIZE = 512  # of the product that is timed: 60 ms on the reference BLAS


def facts() -> dict[str, Any]:
    """Find out the abilities of MLX on this machine, as JSON."""
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
    """Billions of float32 operations a second of a product on the CPU."""
    with mx.stream(mx.cpu):
        a = mx.ones((SIZE, SIZE))
        mx.eval(a @ a)  # loads what there is to load
        start = time.perf_counter()
        mx.eval(a @ (a + 1))
    return 2 * SIZE**3 / (time.perf_counter() - start) / 1e9


def _fast_blas() -> str | None:
    """Find a quick BLAS among the libraries of this process; None: the reference one of the wheel."""
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"/lib(openblas|mkl_rt|blis)[^/\n]*$", maps, re.MULTILINE)
    return found[1] if found else None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(facts()))
