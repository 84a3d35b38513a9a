"""Steps of a preset with additional plugin sets, in turns in one process: speed and memory relative to the preset.

    python -m benchmarks.preset_steps --preset speedrun --set triton --set triton,sparse_rows [--steps 20]
        [--repeats 5] [--warm 17] [--profile] [--update] [--setting key=value ...]
    python -m benchmarks.preset_steps --preset speedrun --set=-relu2,fp8_mlp   # in place of relu2
    python -m benchmarks.preset_steps --set="-relu2,fp8_mlp fp8_mlp.backward=fp8"   # with a setting of its own

The first variant is the preset alone. Schedules have their mid-run values; ids are drawn by
Zipf's law, as in benchmarks.sparse_rows. ``ratio`` is tokens/s over the preset's, from the medians of all steps,
and turn by turn; ``mfu`` is the model's FLOP/s (minillm plan) over the device's, None if these are unknown.
--profile adds a step of each by kernel, and ``host_ms``, the host's time to enqueue one: a GPU waits if that
is longer than its own. --update adds the time of the optimizer's update alone, on a GPU, and its kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.command import measuring, written
from benchmarks.ours import activated
from benchmarks.sparse_rows import BATCHES, Stepped, memory_of
from benchmarks.turns import Memory, Turns, ratio, take_turns

ALONE = "the preset alone"


def plugins_and_settings(given: str) -> tuple[str, tuple[str, ...]]:
    """Split ``"a,b key=value ..."``, the value of --set, at its blanks."""
    plugins, *settings = given.split()
    return plugins, tuple(settings)


def figures_of(turns: Turns) -> dict[str, Any]:
    """Return step times, memory, kernels, and ratios to the preset alone, by variant."""
    base, found = turns.measured.get(ALONE), {}
    for name, one in turns.measured.items():
        seconds = statistics.median(one.steps)
        speed = one.tokens / seconds
        found[name] = {
            "step_ms": round(1000 * seconds, 3),
            "tokens_per_second": round(speed),
            "mfu": mfu_of(one.variant, speed),
            "peak_bytes": one.peak,
            "first_step_seconds": round(one.first_step_seconds, 1),
            **one.variant.facts(),
            **({"ratio": ratio(one, base)} if base else {}),
        }
    return {"sets": found, "failed": turns.failed}


def mfu_of(variant: Any, speed: float) -> float | None:
    """Return the model's FLOP/s at a speed in tokens/s over the device's dense FLOP/s; None if unknown."""
    peak = variant.binding.peak_flops
    return round(speed * variant.plan.estimate().flops_per_token / peak, 4) if peak else None


def profile_of(variant: Stepped, memory: Memory) -> dict[str, Any]:
    """Profile a step, and time how long the host is busy with one, the median of five."""
    from benchmarks.profiling import profiled  # imports torch

    found, host = profiled(variant.step, gpu=type(memory) is not Memory), []
    for _ in range(5):
        memory.wait()
        began = time.perf_counter()
        variant.step()
        host.append(time.perf_counter() - began)
    return {"host_ms": round(1000 * statistics.median(host), 3), "profile": found}


def update_of(variant: Stepped) -> dict[str, Any]:
    """Time the optimizer's update alone on a GPU, the median of fifteen in ms, and list its kernels.

    It repeats the last step's update, with the same gradients, so that the parameters are of no use afterwards.
    """
    import torch

    from benchmarks.loss_kernels import timed
    from benchmarks.profiling import profiled

    optimizer, recorded = variant.trainer.optimizer, []
    update = optimizer.step
    optimizer.step = lambda *arguments: (recorded.append(arguments), update(*arguments))[1]
    variant.step()
    variant.read()
    optimizer.step = update
    again, times = partial(update, *recorded[0]), []
    for _ in range(15):
        torch.cuda._sleep(20_000_000)  # 10 ms: the host enqueues the whole update meanwhile
        times.append(timed(again))
    return {"update_ms": round(statistics.median(times), 3), "update": profiled(again, gpu=True)}


def main() -> None:
    """Measure every set, write the result file after each round, and print a table."""
    parser = measuring(__doc__, "preset_steps")
    parser.add_argument("--preset", default="speedrun")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PLUGINS [KEY=VALUE ...]", help="added to it"
    )
    parser.add_argument("--setting", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each")
    parser.add_argument("--warm", type=int, default=BATCHES + 1, help="steps before the first turn")
    parser.add_argument("--profile", action="store_true", help="also a step of each by kernel")
    parser.add_argument(
        "--update", action="store_true", help="also the optimizer's update of each alone"
    )
    given = parser.parse_args()

    def maker(plugins: str, own: Sequence[str]) -> Callable[[], tuple[Stepped, int]]:
        def make() -> tuple[Stepped, int]:
            made = Stepped([*given.setting, *own], plugins, given.backend, given.preset)
            return made, made.tokens

        return make

    sets = {name: plugins_and_settings(name) for name in given.set}
    for (
        plugins,
        own,
    ) in sets.values():  # one that planning refuses ends the command before anything compiles
        activated([*given.setting, *own], plugins, given.backend, preset=given.preset)
    makers: dict[str, Any] = {
        ALONE: maker("", ()),
        **{name: maker(*one) for name, one in sets.items()},
    }
    counts = {"steps": given.steps, "repeats": given.repeats}
    memory, said = memory_of(given.backend), {"preset": given.preset, "settings": given.setting}
    found: dict[str, Any] = {}
    for turns in take_turns(makers, memory, say=print, warm=given.warm, together=5, **counts):
        found = figures_of(turns)
        path = written(given, {**said, **found})
    for name, one in turns.measured.items():
        if given.profile:
            found["sets"][name] |= profile_of(one.variant, memory)
        if given.update:  # last: the parameters are of no use after it
            found["sets"][name] |= update_of(one.variant)
    if given.profile or given.update:
        path = written(given, {**said, **found})
    print(path)
    for name, one in found["sets"].items():
        by = one["ratio"]["tokens_per_second"] if "ratio" in one else float("nan")
        mfu = "" if one["mfu"] is None else f", MFU {one['mfu']:.3f}"
        print(
            f"{name}: {one['step_ms']} ms, {one['tokens_per_second']:,} tokens/s, {by:.3f} x{mfu}, "
            f"{one['peak_bytes'] / 2**30:.2f} GiB"
            + (f", update {one['update_ms']} ms" if "update_ms" in one else "")
        )


if __name__ == "__main__":
    main()
