"""kill -9 of a run with each of minillm's kernel plugins on a GPU, a resume, and a bitwise equal end.

    python -m benchmarks.kernels_killed [--tried 3] [--only SET] [--jobs 4] [--seed S]

A trial is that of benchmarks.plugins_killed, on a GPU and with ``--deterministic``: a run of 24 steps in
bfloat16, killed at a random moment after a checkpoint exists, resumed to its end and compared with an
uninterrupted run. Each trainer is a process of its own. Sets whose packages are not installed are listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from benchmarks.plugins_killed import Trial, attempt
from benchmarks.trials.bench import finish, parser, workshop
from benchmarks.trials.tiny_run import TinyRun

__all__ = ["main"]

SETTINGS = (
    "--deterministic",
    *("train.dtype=bfloat16", "train.compile=off", "train.rows=4", "train.seq_len=128"),
    # heads of 128 and sides that are multiples of 16, as third-party kernels and fp8 need
    *("model.dim=128", "model.heads=1", "model.kv_heads=1", "model.hidden=256"),
)
SETS: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "triton": ("muon,triton",),
    "fp8_head": ("fp8_head",),
    "fp8_mlp": ("fp8_mlp",),
    "fp8_mlp, gradients too": ("fp8_mlp", "fp8_mlp.backward=fp8"),
    "liger": ("liger",),
    "cute": ("cute,windows", "windows.window=64", "windows.documents=true"),
    "fused_relu2": ("fused_relu2",),
    "fused_swiglu": ("fused_swiglu",),
    "together, compiled": ("muon,triton,fp8_mlp,fp8_head", "triton.loss=auto", "train.compile=on"),
}
"""Name -> plugins, and settings of their own."""

NEEDED = {"triton": "triton", "fp8_head": "triton", "together, compiled": "triton"}
NEEDED |= {"liger": "liger_kernel"} | dict.fromkeys(
    ("cute", "fused_relu2", "fused_swiglu"), "quack"
)
"""Set -> the package without which it does not run."""


def main() -> int:
    """Try every set, write the result, and print a table."""
    options = parser(__doc__)
    options.add_argument("--tried", type=int, default=3, help="trials of each set")
    options.add_argument("--only", choices=SETS, help="one set")
    options.add_argument(
        "--device", default="cuda", help="cpu tries this script with the plain set"
    )
    given = options.parse_args()
    left_out = {name: f"needs {it}" for name, it in NEEDED.items() if find_spec(it) is None}
    if given.device == "cpu":
        left_out |= dict.fromkeys(SETS.keys() - {"plain"}, "it runs on cuda alone")
    with workshop(given) as folder:
        for name, why in left_out.items():
            print(f"{name} is left out: {why}", flush=True)
        planned = []
        for place, (name, own) in enumerate(SETS.items()):
            if name in left_out or given.only not in (None, name):
                continue
            plugins, *settings = own or ("",)
            run = TinyRun(folder, "torch", plugins, (*SETTINGS, *settings), given.device)
            numbers = range(place * given.tried, (place + 1) * given.tried)
            planned += [Trial(name, ", ".join(own), run, number, given.seed) for number in numbers]
        if not planned:
            raise SystemExit("no set is left to try")
        _ = planned[0].run.text  # written before the trials share it
        rows, cells = attempt(planned, given.jobs)
        rows[0].what = f"kill -9 with each set of kernels, {given.device}"
        return finish("kernels_killed", rows, given, plugins=cells, left_out=left_out)


if __name__ == "__main__":
    raise SystemExit(main())
