"""A program that loads directories with their own modeling files where minillm cannot be imported.

Usage: ``python own_elsewhere.py transformers|mlx DIR ...``. Each DIR contains the expected values in
``expected.npz``: ids (T,) and logits (T, V). The output is a JSON object: DIR -> facts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NEW = 32  # generated tokens


class Absent:
    """An import finder that blocks minillm."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise for modules of minillm."""
        if name.startswith("minillm"):
            raise ImportError(f"{name} is not here")


def on_transformers(
    folder: Path,
) -> tuple[Callable[..., np.ndarray], Callable[..., list[list[int]]]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    ).eval()

    def logits(rows: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(rows.astype(np.int64))).logits.numpy()

    def generate(rows: np.ndarray, count: int) -> list[list[int]]:
        given = torch.from_numpy(rows.astype(np.int64))
        made = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
        return made[:, rows.shape[1] :].tolist()

    return logits, generate


def on_mlx(folder: Path) -> tuple[Callable[..., np.ndarray], Callable[..., list[list[int]]]]:
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(folder, trust_remote_code=True)

    def logits(rows: np.ndarray) -> np.ndarray:
        return np.array(model(mx.array(rows.astype(np.int32))).astype(mx.float32))

    def generate(rows: np.ndarray, count: int) -> list[list[int]]:
        return [
            [int(one) for one, _ in generate_step(mx.array(row), model, max_tokens=count)]
            for row in rows.astype(np.int32)
        ]

    return logits, generate


def facts(folder: Path, load: Callable[[Path], Any]) -> dict[str, Any]:
    """Compare a directory's logits with the expected ones, and generation with the KV cache with full passes."""
    expected = np.load(folder / "expected.npz")
    ids, wanted = expected["ids"], expected["logits"]
    logits, generate = load(folder)
    apart = float(np.abs(logits(ids[None])[0] - wanted).max())
    rows = np.stack([ids[:5], ids[5:10]])
    made, full = generate(rows, NEW), rows
    for _ in range(NEW):
        full = np.concatenate([full, logits(full)[:, -1].argmax(-1)[:, None]], 1)
    return {
        "apart": apart,
        "largest": float(np.abs(wanted).max()),
        "cached": made,
        "full": full[:, rows.shape[1] :].tolist(),
    }


if __name__ == "__main__":
    sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]
    on = {"transformers": on_transformers, "mlx": on_mlx}[sys.argv[1]]
    found = {}
    for name in sys.argv[2:]:
        try:
            found[name] = facts(Path(name), on)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))
