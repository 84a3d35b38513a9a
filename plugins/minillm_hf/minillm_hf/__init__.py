"""Model directories: what Transformers, vLLM and mlx-lm load, written and read.

    config.json                     architecture and sizes
    model.safetensors               or model-0000i-of-0000n.safetensors and their index
    tokenizer.json                  with tokenizer_config.json
    generation_config.json

A run's parameters are renamed, never changed; by a layout.

    layouts     an architecture's tensors, and its config.json, both ways
    scaling     rotary scaling: config.json and plugins, both ways
    match       parameters of a plan and tensors of a directory, both ways
    read        a directory of any program, checked before it is used
    write       a directory that is there whole or not at all
    directory   the seam: what the core calls
    lora        the plugin that trains adapters; peft: what it trained, written alone
"""

from __future__ import annotations

from minillm_hf.directory import HUGGING_FACE, HuggingFace
from minillm_hf.layouts import LAYOUTS, Layout
from minillm_hf.match import export_layout, exported, fit
from minillm_hf.read import HuggingFaceDirectory, read_model_directory, tokenizer_facts
from minillm_hf.scaling import Scaling, scaling_of
from minillm_hf.write import tokenizer_documents, write_directory

__all__ = [
    "HUGGING_FACE",
    "LAYOUTS",
    "HuggingFace",
    "HuggingFaceDirectory",
    "Layout",
    "Scaling",
    "export_layout",
    "exported",
    "fit",
    "read_model_directory",
    "scaling_of",
    "tokenizer_documents",
    "tokenizer_facts",
    "write_directory",
]
