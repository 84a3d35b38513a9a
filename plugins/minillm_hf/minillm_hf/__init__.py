"""Model directories in the format of Transformers, vLLM and mlx-lm: reading and writing.

    config.json                     architecture and sizes
    model.safetensors               or model-0000i-of-0000n.safetensors and their index
    tokenizer.json                  with tokenizer_config.json
    generation_config.json

A layout maps a run's parameters to the directory's tensors by name; values do not change.

    layouts     tensor names and config.json of each architecture, both ways
    scaling     rotary scaling: config.json <-> plugin options
    match       parameters of a plan <-> tensors of a directory
    read        reading a directory of any program, validated before use
    write       writing a directory atomically
    directory   the DirectoryFormat that the core calls
    own         models of no such architecture, written with modeling files of their own
    lora        the plugin that trains adapters; peft: writing the adapters alone
"""

from __future__ import annotations

from minillm_hf.directory import HUGGING_FACE, HuggingFace
from minillm_hf.layouts import LAYOUTS, Layout
from minillm_hf.match import export_layout, exported, fit
from minillm_hf.own.directory import write_own
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
    "write_own",
]
