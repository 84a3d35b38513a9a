"""Planning of a run with more than 20 plugins in this process, started and timed by benchmarks.planning.

    python -m benchmarks.planned

Prints one JSON object: the seconds of each part, and the frameworks loaded at the end.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from typing import Any

SETTINGS = ("model.layers=6", "model.vocab=50304", "role_lr.embedding=2.0")
PRESET = "small"
PLUGINS = (
    *("attn_scale", "backout", "bigram_hash", "cautious_wd", "embed_norm", "embed_skip"),
    *("half_rope", "mtp", "muon", "normuon", "polar_express", "qk_norm", "relu2"),
    *("residual_decay", "role_lr", "smear", "softcap", "sparse_gate", "unet_skip"),
    *("value_embeds", "windows", "xsa", "zero_init"),
)
"""All plugins of this repository that can be planned together, except those that need third-party packages."""

FRAMEWORKS = ("torch", "mlx", "jax", "tensorflow", "triton", "transformers", "scipy", "pandas")


def planned() -> dict[str, Any]:
    """Plan once; minillm is imported here, since the import is timed."""
    marks = [time.perf_counter()]
    from minillm_core.config.load import load as load_settings
    from minillm_core.plan import build_plan
    from minillm_core.plugins.manager import load as load_plugins

    marks.append(time.perf_counter())
    cpu = time.process_time()
    loaded = load_settings(
        preset=PRESET,
        plugins=",".join(PLUGINS),
        assignments=SETTINGS,
        default_preset=lambda: (PRESET, "benchmark"),
    )
    marks.append(time.perf_counter())
    plugins = load_plugins(loaded.specs, loaded.config.plugins)
    marks.append(time.perf_counter())
    plan = build_plan(loaded.config, plugins)
    marks.append(time.perf_counter())
    digest = plan.hash
    marks.append(time.perf_counter())
    parts = ("imports", "settings", "plugins", "hooks", "hash")
    return {
        "planning_cpu_seconds": time.process_time() - cpu,
        "planning_seconds": marks[-1] - marks[1],
        "parts_seconds": {
            part: end - start for part, (start, end) in zip(parts, pairwise(marks), strict=True)
        },
        "plugins": len(plan.plugins),
        "plan_hash": digest,
        "frameworks": sorted(set(FRAMEWORKS) & set(sys.modules)),
    }


if __name__ == "__main__":
    print(json.dumps(planned()))
