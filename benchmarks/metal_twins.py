"""The Metal kernels as CUDA: the same source on an NVIDIA GPU, against float64.

    python -m benchmarks.metal_twins write FOLDER    # needs MLX and g++: any Linux machine
    python -m benchmarks.metal_twins run FOLDER      # needs only CuPy: prints JSON, exits 1 on a failure
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m benchmarks.metal_twins run FOLDER
    compute-sanitizer --tool memcheck --error-exitcode 9 python -m benchmarks.metal_twins run FOLDER

``write`` records every launch of every case in the emulator, translates its source, and stores its
inputs and results. ``run`` launches each with the same inputs, and compares its results with those of
the emulator and, if they are a case's results, with float64, by the op's contract. Nothing is
timed: a warp replaces a simdgroup, and 8 x 8 products are shuffles.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

SAME = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 1e-3}
"""Tolerance against the emulator: a rounding to the dtype, or another order of a sum."""


def main() -> int:
    """Run the command."""
    match sys.argv[1:]:
        case ["write", folder]:
            return write(Path(folder))
        case ["run", folder]:
            return run(Path(folder))
    print(__doc__)
    return 0 if sys.argv[1:] == ["--help"] else 2


def write(folder: Path) -> int:
    """Write cases.json, and for each launch NAME.cu and NAME.npz."""
    from minillm_core.inspection import CONTRACTS
    from minillm_metal.cases import cases
    from minillm_metal.emulator import as_cuda, emulated

    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for case in cases():
        with emulated(orders=("forward",)) as launched:
            found = case.compute()
        wanted = dict(zip(map(_numbers, found), case.wanted, strict=True))
        for number, done in enumerate(launched):
            name = f"{case.name}.{number}"
            outputs = [_exact(output, wanted) for output in done.outputs]
            (folder / f"{name}.cu").write_text(as_cuda(done.launch))
            arrays = {f"in{i}": x for i, x in enumerate(done.inputs)}
            arrays |= {f"out{i}": x for i, x in enumerate(done.outputs)}
            arrays |= {f"exact{i}": x for i, x in enumerate(outputs) if x is not None}
            np.savez(folder / f"{name}.npz", **arrays)
            grid = [
                -(-g // t) for g, t in zip(done.launch.grid, done.launch.threadgroup, strict=True)
            ]
            listed.append(
                {
                    "name": name,
                    "kernel": done.launch.name,
                    "dtype": case.dtype,
                    "tolerance": CONTRACTS[case.op].tolerance[case.dtype],
                    "blocks": grid,
                    "threads": list(done.launch.threadgroup),
                }
            )
    (folder / "cases.json").write_text(json.dumps(listed, indent=1))
    print(f"{len(listed)} launches in {folder}")
    return 0


def run(folder: Path) -> int:
    """Launch each kernel on the GPU; print a line of JSON."""
    if not (cases := folder / "cases.json").is_file():
        raise SystemExit(f"there is no {cases}: python -m benchmarks.metal_twins write {folder}")
    if find_spec("cupy") is None:
        raise SystemExit(
            "CuPy launches the kernels, and is not installed: pip install cupy-cuda12x"
        )
    import cupy

    rows, failed = [], 0
    for case in json.loads(cases.read_text()):
        source = (folder / f"{case['name']}.cu").read_text()
        options = ("-std=c++17", "--fmad=false")
        kernel = cupy.RawModule(code=source, options=options).get_function(case["kernel"])
        with np.load(folder / f"{case['name']}.npz") as arrays:
            inputs = [cupy.asarray(arrays[f"in{i}"]) for i in range(_count(arrays, "in"))]
            wanted = [arrays[f"out{i}"] for i in range(_count(arrays, "out"))]
            outputs = [cupy.empty_like(cupy.asarray(x)) for x in wanted]
            for output in outputs:
                output.view(cupy.uint8).fill(0xFF)
            kernel(tuple(case["blocks"]), tuple(case["threads"]), (*inputs, *outputs))
            cupy.cuda.Device().synchronize()
            for i, (output, same) in enumerate(zip(outputs, wanted, strict=True)):
                got = _wide(cupy.asnumpy(output))
                row = {"launch": case["name"], "output": i, "emulator": _error(got, _wide(same))}
                good = row["emulator"] <= SAME[case["dtype"]]
                if f"exact{i}" in arrays:
                    row["float64"] = _error(got, arrays[f"exact{i}"])
                    good = good and row["float64"] <= case["tolerance"]
                row["passed"] = bool(good)
                failed += not good
                rows.append(row)
    print(json.dumps({"outputs": len(rows), "failed": failed, "rows": rows}))
    return 1 if failed else 0


def _numbers(x: Any) -> bytes:
    from minillm_metal.emulator.launcher import as_numpy

    return as_numpy(x).tobytes()


def _exact(output: np.ndarray, wanted: dict[bytes, np.ndarray]) -> np.ndarray | None:
    found = wanted.get(np.ascontiguousarray(output).tobytes())
    return found if found is None else found.reshape(output.shape)


def _count(arrays: Any, kind: str) -> int:
    return sum(name.startswith(kind) for name in arrays.files)


def _wide(x: np.ndarray) -> np.ndarray:
    """Convert to float64; uint16 are the bits of bfloat16."""
    if x.dtype == np.uint16:
        x = (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


def _error(got: np.ndarray, want: np.ndarray) -> float:
    size = max(float(np.linalg.norm(want)), want.size**0.5, 1.0)
    return float(np.linalg.norm(got - want)) / size


if __name__ == "__main__":
    sys.exit(main())
