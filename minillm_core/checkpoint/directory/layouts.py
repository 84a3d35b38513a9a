"""The layouts that there are: a new one is a file beside this one, and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from minillm_core.checkpoint.directory.layout import Layout
from minillm_core.checkpoint.directory.llama import LLAMA
from minillm_core.checkpoint.directory.qwen3 import QWEN3

__all__ = ["LAYOUTS"]

LAYOUTS: Mapping[str, Layout] = {layout.name: layout for layout in (LLAMA, QWEN3)}
