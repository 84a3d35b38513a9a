"""The directory format of Hugging Face models, with the core's interface: recognise, read, check, write."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minillm_core import Plan, Refusal
from minillm_core.directories import DirectoryFormat, TrainedModel
from minillm_hf.card import card
from minillm_hf.hub import fetch
from minillm_hf.layouts import model_of
from minillm_hf.match import export_layout, exported
from minillm_hf.origin import (
    GENERATION_CONFIG,
    as_it_is,
    taken_over,
    with_base,
)
from minillm_hf.read import (
    ADAPTER_CONFIG,
    CONFIG,
    TOKENIZER,
    HuggingFaceDirectory,
    lacks_config,
    positions_of,
    read_json,
    read_model_directory,
)
from minillm_hf.scaling import scaling_of
from minillm_hf.write import DTYPES, SHARD_BYTES, tokenizer_documents, write_directory


class HuggingFace(DirectoryFormat):
    """Directories with a config.json, as Transformers, vLLM and mlx-lm load them."""

    def recognises(self, path: Path) -> bool:
        """Return whether the path is a folder with a config.json, or with a model's weights alone."""
        return (path.is_dir() and os.path.lexists(path / CONFIG)) or lacks_config(path)

    def read(self, path: Path) -> HuggingFaceDirectory:
        """Read and validate a directory, except for tensor values."""
        return read_model_directory(path)

    def fetch(self, name: str, say: Callable[[str], None]) -> Path | None:
        """Fetch a model of the hub, ``OWNER/NAME[@REVISION]``; None: the name has another form.

        Raises:
            Refusal: it cannot be fetched, or it is a model directory with a step, which runs alone have.
        """
        folder, _, step = name.rpartition("@")
        if folder and (step == "best" or step.isdecimal()) and _is_model(Path(folder)):
            raise Refusal(
                f"{folder} is a model directory, which has no steps: @{step} is for the folder of a run",
                where=f"--init {name}",
                fix=f"--init {shlex.quote(folder)}",
            )
        return fetch(name, say)

    def check(self, plan: Plan) -> None:
        """Check that a plan's model has exactly the tensors of its layout."""
        export_layout(plan)

    def write(
        self,
        folder: Path,
        model: TrainedModel,
        say: Callable[[str], None],
        *,
        shard_bytes: int = SHARD_BYTES,
        dtype: str = "float32",
    ) -> int:
        """Write config.json, the tensors, the tokenizer and a model card.

        The other files of a directory that is exported as it is are copied.
        """
        check_dtype(dtype)
        tensors = exported(model.plan, model.arrays)
        config = config_of(model)
        copied = as_it_is(model, config)
        documents = documents_of(config, model, say) if copied is None else copied
        documents[CONFIG]["dtype"] = dtype
        parameters = sum(array.size for array in tensors.values())
        documents["README.md"] = card(folder.name, model, parameters, dtype, begun=copied is None)
        write_directory(folder, tensors, documents, shard_bytes=shard_bytes, dtype=dtype)
        return parameters

    def loading(self, folder: str) -> Mapping[str, str]:
        """Return how Transformers loads the folder, and unless it lacks a tokenizer, vLLM and mlx-lm."""
        quoted = shlex.quote(folder)
        typed = {"transformers": f"AutoModelForCausalLM.from_pretrained({json.dumps(folder)})"}
        if not lacks_tokenizer(folder):
            typed["vLLM"] = f"vllm serve {quoted}"
            typed["mlx-lm"] = f"mlx_lm.generate --model {quoted} --prompt ..."
        return typed


def lacks_tokenizer(folder: str) -> bool:
    """Return whether a written directory has no tokenizer, which programs that take text need."""
    return Path(folder).is_dir() and not (Path(folder) / TOKENIZER).is_file()


def _is_model(path: Path) -> bool:
    """Return whether a path is a model directory, or that of an adapter."""
    return HUGGING_FACE.recognises(path) or (path / ADAPTER_CONFIG).is_file()


def check_dtype(dtype: str) -> None:
    """Check that a dtype is supported for written tensors."""
    if dtype not in DTYPES:
        raise Refusal(
            f"a model directory cannot be written in {dtype}",
            where=f"dtype={dtype}",
            fix=f"one of {', '.join(DTYPES)}",
        )


def longest_row(plan: Plan) -> int:
    """Return the longest row of a model: of its training, or of the directory that it started from.

    The latter applies while the directory is still there, and the rotary base and scaling are its own.
    """
    config = plan.config
    if config.init is None:
        return config.train.seq_len
    try:
        folder = with_base(Path(config.init))[-1]
        document = read_json(folder / CONFIG)
        _, theirs, scaling = model_of(document, str(folder / CONFIG))
    except Refusal:  # changed or removed since
        return config.train.seq_len
    kept = (theirs.rope_base, scaling) == (config.model.rope_base, scaling_of(plan))
    return max(config.train.seq_len, (positions_of(document) if kept else None) or 0)


def config_of(model: TrainedModel) -> dict[str, Any]:
    """Build the config.json of a model that has a layout."""
    config, tokenizer = model.plan.config, model.tokenizer
    return export_layout(model.plan).document(
        config.model,
        positions=longest_row(model.plan),
        boundary=tokenizer.end_of_text if tokenizer else None,
        scaling=scaling_of(model.plan),
    )


def documents_of(
    config: dict[str, Any], model: TrainedModel, say: Callable[[str], None]
) -> dict[str, Any]:
    """Build the JSON files of a directory with this config.json: name -> content."""
    tokenizer, theirs = model.tokenizer, taken_over(model, say)
    boundary = tokenizer.end_of_text if tokenizer else None
    documents = {
        CONFIG: config,
        GENERATION_CONFIG: {f"{name}_token_id": boundary for name in ("bos", "eos", "pad")}
        | dict(theirs.sampling),
    }
    if tokenizer is None:
        say("the run was trained on ids: there is no tokenizer to write")
        return documents
    token = tokenizer.end_of_text_token
    start = tokenizer.start_token
    positions = config["max_position_embeddings"]
    files = tokenizer_documents(tokenizer.text(), boundary=start, ends=token, positions=positions)
    for name in (CONFIG, GENERATION_CONFIG):
        documents[name]["bos_token_id"] = tokenizer.start
    asked = model.plan.sourcing
    if (template := asked.template or theirs.template) is not None:
        added = {
            str(one["id"]): {key: value for key, value in one.items() if key != "id"}
            for one in files[TOKENIZER]["added_tokens"]
        }
        files["tokenizer_config.json"] |= {
            "chat_template": template,
            "added_tokens_decoder": added,
            "split_special_tokens": False,
        }
    ends = (boundary, *(model.specials[name] for name in asked.ends or ()), *theirs.ends)
    if len(ends := list(dict.fromkeys(ends))) > 1 or asked.template is not None:
        documents[GENERATION_CONFIG]["eos_token_id"] = ends
    return documents | files


HUGGING_FACE = HuggingFace()
