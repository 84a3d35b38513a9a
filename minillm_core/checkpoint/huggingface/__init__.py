"""Model directories: what Transformers, vLLM and mlx-lm load, written and read.

    config.json                     architecture and sizes
    model.safetensors               or model-0000i-of-0000n.safetensors and their index
    tokenizer.json                  with tokenizer_config.json
    generation_config.json

A run's parameters are renamed, never changed; by a layout.
"""

from __future__ import annotations

from minillm_core.checkpoint.huggingface.layout import LAYOUTS
from minillm_core.checkpoint.huggingface.match import (
    Fitted,
    export_checked,
    export_layout,
    exported,
    fit,
)
from minillm_core.checkpoint.huggingface.read import ModelDirectory, read_model_directory
from minillm_core.checkpoint.huggingface.write import tokenizer_documents, write_directory

__all__ = [
    "LAYOUTS",
    "Fitted",
    "ModelDirectory",
    "export_checked",
    "export_layout",
    "exported",
    "fit",
    "read_model_directory",
    "tokenizer_documents",
    "write_directory",
]
