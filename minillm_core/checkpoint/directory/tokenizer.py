"""The tokenizer's half of a model directory: ``AutoTokenizer`` must give the ids of training."""

from __future__ import annotations

import json
from typing import Any

import tokenizers

__all__ = ["tokenizer_documents"]


def tokenizer_documents(
    text: str, *, boundary: str, positions: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """tokenizer.json and tokenizer_config.json, and what a person should know.

    Args:
        text: the run's tokenizer.json.
        boundary: the token before every document.
        positions: the longest row that the model has seen.
    """
    document, notes = json.loads(text), []
    if tokenizers.Tokenizer.from_str(text).num_special_tokens_to_add(False):
        # ids of training are those of the text alone
        document["post_processor"] = None
        notes.append(
            "the tokenizer added special tokens to each text by itself, and training did not "
            "take them: the exported one adds none"
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": positions,
        "bos_token": boundary,
        "eos_token": boundary,
        "pad_token": boundary,
        "unk_token": document["model"].get("unk_token"),
        "clean_up_tokenization_spaces": False,
        # the boundary's name written out in a text is text, as it was in training
        "split_special_tokens": True,
    }
    return {"tokenizer.json": document, "tokenizer_config.json": config}, tuple(notes)
