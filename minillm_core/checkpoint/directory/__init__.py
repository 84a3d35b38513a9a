"""Model directories: what Transformers, vLLM and mlx-lm load, written and read.

    config.json                     architecture and sizes
    model.safetensors               or model-0000i-of-0000n.safetensors and their index
    tokenizer.json                  with tokenizer_config.json
    generation_config.json

A run's parameters are renamed, never changed; a layout says how.
"""

from __future__ import annotations

from minillm_core.checkpoint.directory.layout import Layout
from minillm_core.checkpoint.directory.layouts import LAYOUTS
from minillm_core.checkpoint.directory.match import (
    Fitted,
    export_checked,
    export_layout,
    exported,
    fit,
)
from minillm_core.checkpoint.directory.read import ModelDirectory, read_model_directory
from minillm_core.checkpoint.directory.tokenizer import tokenizer_documents
from minillm_core.checkpoint.directory.write import refuse_taken, write_directory

__all__ = [
    "LAYOUTS",
    "Fitted",
    "Layout",
    "ModelDirectory",
    "export_checked",
    "export_layout",
    "exported",
    "fit",
    "read_model_directory",
    "refuse_taken",
    "tokenizer_documents",
    "write_directory",
]
