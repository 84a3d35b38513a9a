"""Decoding with a KV cache compared with recomputing the text for each token, on this machine.

    python -m benchmarks.decoding                  # attentions and lanes, 1,024 tokens, torch
    python -m benchmarks.decoding mla --backend mlx --tokens 256
    python -m benchmarks.decoding mla dc_mha --model gpt2-124m

A model with its initial values continues one sequence token by token. *Cached* is the sum over all tokens;
*again* is the sum of passes over the whole text so far, of which every 64th is measured. Bytes of the
cache are those stored per token and layer, in float32. The largest difference of
logits is that of the cached ones from the whole pass, at the measured passes.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.command import measuring, written
from minillm_core import Plan, build_plan, load
from minillm_core.backends.base import lone_row
from minillm_core.inspection import trainer

PLUGINS = (
    *("", "value_residual", "diff_attn", "attn_sink", "forgetting_attn", "mla", "gated_delta"),
    *("dc_mha", "hyper_connections", "mudd"),
)
SMALL = {
    **{"model.layers": 4, "model.dim": 256, "model.heads": 8, "model.kv_heads": 8},
    **{"model.hidden": 768, "model.vocab": 4096},
}
SMALLEST = "tiny"
MODELS: dict[str, dict[str, int]] = {SMALLEST: SMALL, "gpt2-124m": {}}
EVERY = 64


def plan_of(plugin: str, tokens: int, backend: str, preset: str) -> Plan:
    """Plan a model with one plugin, or none, for rows of this many tokens."""
    settings = {**MODELS[preset], "train.seq_len": tokens}
    run = {"train.rows": 1, "train.compile": "off", "train.dtype": "float32"}
    where = {"backend": backend, "device": "cpu"}
    return build_plan(load(preset=preset, plugins=plugin, settings={**settings, **run, **where}))


def measured(plugin: str, tokens: int, backend: str, preset: str) -> dict[str, Any]:
    """Decode in both ways."""
    plan = plan_of(plugin, tokens, backend, preset)
    model = trainer(plan, backend)
    ids = np.random.default_rng(0).integers(0, plan.config.model.vocab, tokens).astype(np.int32)
    row, decoding = lone_row(ids), model.decoding()
    cached, found = 0.0, []
    for at in range(tokens):
        began = time.perf_counter()
        found.append(decoding.feed({key: one[:, at : at + 1] for key, one in row.items()}))
        cached += time.perf_counter() - began
    again, apart = 0.0, 0.0
    for end in range(EVERY, tokens + 1, EVERY):
        began = time.perf_counter()
        logits = model.next_logits({key: one[:, :end] for key, one in row.items()})
        again += EVERY * (time.perf_counter() - began)
        apart = max(apart, float(np.abs(logits - found[end - 1]).max()))
    held = [one for arrays in decoding.cache.kept.values() for one in arrays if one is not None]
    return {
        "plugin": plugin or "plain",
        "tokens": tokens,
        "cached_seconds": round(cached, 2),
        "again_seconds": round(again, 1),
        "faster": round(again / cached, 1),
        "cache_bytes": round(
            sum(4 * int(np.prod(one.shape)) for one in held) / tokens / plan.config.model.layers
        ),
        "largest_difference": apart,
    }


def main() -> None:
    """Measure, print and write."""
    parser = measuring(__doc__, "decoding")
    parser.add_argument("plugins", nargs="*", default=PLUGINS)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument(
        "--model",
        choices=MODELS,
        default=SMALLEST,
        help="4 layers, 256 wide; or 12 layers, 768 wide",
    )
    parser.add_argument("--backend", choices=("torch", "mlx"), default="torch")
    given = parser.parse_args()
    rows = []
    for plugin in given.plugins:
        rows.append(row := measured(plugin, given.tokens, given.backend, given.model))
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    print(written(given, {"backend": given.backend, "model": given.model, "rows": rows}))


if __name__ == "__main__":
    main()
