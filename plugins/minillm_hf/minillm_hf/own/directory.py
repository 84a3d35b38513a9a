"""The layout ``own``: a directory with the modeling files of its model, for Transformers and mlx-lm."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core import Plan, PlanError, Refusal
from minillm_core.commands import listed
from minillm_core.directories import DirectoryFormat, ModelDirectory, TrainedModel
from minillm_core.inspection import Node, batch_hook
from minillm_hf.card import card
from minillm_hf.directory import check_dtype, documents_of, lacks_tokenizer
from minillm_hf.layouts import OWN_MODEL, in_loss_alone, products
from minillm_hf.own.copying import CannotWriteError
from minillm_hf.own.draft import written
from minillm_hf.own.tidying import finished
from minillm_hf.own.writing import (
    FRAMEWORKS,
    MLX,
    MODEL,
    TRANSFORMERS,
    Writer,
    sizes_of,
)
from minillm_hf.write import SHARD_BYTES, write_directory


class OwnDirectory(DirectoryFormat):
    """Directories with their own modeling files; they can be written, but not read."""

    def recognises(self, path: Path) -> bool:
        """Return False: a run starts from its own folder, and a directory's code is never run."""
        return False

    def read(self, path: Path) -> ModelDirectory:
        """Refuse: see :meth:`recognises`."""
        raise Refusal(
            "a directory with its own modeling files is not read here",
            where=str(path),
            fix="the folder of the run that it was exported from",
        )

    def check(self, plan: Plan) -> None:
        """Check that a plan's model can be written, by generating its modeling files."""
        _written(plan, {})

    def write(
        self,
        folder: Path,
        model: TrainedModel,
        say: Callable[[str], None],
        *,
        shard_bytes: int = SHARD_BYTES,
        dtype: str = "float32",
    ) -> int:
        """Write the modeling files, config.json, the tensors, the tokenizer and a model card."""
        check_dtype(dtype)
        files, tensors = modeling_files(model.plan, model.specials), tensors_of(model)
        if blockers := model.plan.export.blocked_by:
            say(
                f"no layout that other programs know fits {listed(blockers)}: the directory brings the "
                "code of its model"
            )
        documents = documents_of(_config(model, dtype), model, say)
        parameters = sum(array.size for array in tensors.values())
        documents["README.md"] = card(folder.name, model, parameters, dtype, layout="own")
        documents |= files
        write_directory(folder, tensors, documents, shard_bytes=shard_bytes, dtype=dtype)
        return parameters

    def loading(self, folder: str) -> Mapping[str, str]:
        """Return how Transformers loads the folder, and unless it lacks a tokenizer, mlx-lm."""
        quoted, given = shlex.quote(folder), json.dumps(folder)
        typed = {
            "transformers": f"AutoModelForCausalLM.from_pretrained({given}, trust_remote_code=True)"
        }
        if not lacks_tokenizer(folder):
            typed["mlx-lm"] = f"mlx_lm.generate --model {quoted} --trust-remote-code --prompt ..."
        return typed


def modeling_files(plan: Plan, specials: Mapping[str, int] | None = None) -> dict[str, str]:
    """Generate a plan's modeling files: name -> text.

    Args:
        plan: the plan.
        specials: ids of the special tokens that its plugins declare, by name.

    Raises:
        PlanError: a slot or a plugin cannot be written; contains the reason.
    """
    return {name: finished(text, MODEL) for name, text in _written(plan, specials or {}).items()}


def _written(plan: Plan, specials: Mapping[str, int]) -> dict[str, str]:
    try:
        _check_batches(plan)
        return {
            name: Writer(plan, framework, specials).write()
            for name, framework in FRAMEWORKS.items()
        }
    except Exception as error:
        # Any error of a plugin's source: the run can be trained, and its plan notes that it has no export.
        known = isinstance(error, (CannotWriteError, PlanError))
        why = error if known else f"{type(error).__name__}: {error}"
        raise PlanError(
            f"no modeling file can be written: {why}",
            where="plugins: " + (", ".join(one.name for one in plan.plugins) or "none"),
            fix="train without it, or use the run's folder itself (minillm generate, eval)",
        ) from error


def _check_batches(plan: Plan) -> None:
    """Check that no plugin's ``on_batch`` changes the model's inputs during generation.

    Raises:
        CannotWriteError: one does.
    """
    if (hook := batch_hook(plan)) is None:
        return
    columns = min(16, plan.config.train.seq_len)
    ids = np.random.default_rng(0).integers(0, plan.config.model.vocab, (1, columns))
    batch = {
        "ids": ids.astype(np.int32),
        "labels": np.full((1, columns), -1, np.int32),
        "documents": np.zeros((1, columns), np.int32),
        "positions": np.arange(columns, dtype=np.int32)[None],
    }
    shown = hook({name: array.copy() for name, array in batch.items()}, "decode")
    for name in ("ids", "documents", "positions"):
        if not np.array_equal(shown[name], batch[name]):
            raise CannotWriteError(f"a plugin's on_batch changes {name} in phase decode")


def tensors_of(model: TrainedModel) -> dict[str, np.ndarray]:
    """Return a run's arrays by their names in the directory, without those that only training reads.

    Foldable products of plugins (LoRA) are merged into the weights. State of a sublayer that is written
    as another class (fp8_mlp) is left out.
    """
    arrays, folded = model.arrays, products(model.plan)
    plainer = tuple(
        f"layers.{index}.{part}."
        for index, block in enumerate(model.plan.spec.blocks)
        for part in ("attention", "mlp")
        if isinstance(node := getattr(block, part), Node) and written(node) is not node
    )
    inside = tuple(f"{leaf}.product." for leaf in folded)
    tensors = {}
    for name, array in arrays.items():
        kind, _, path = name.partition(".")
        if path.startswith(inside) or in_loss_alone(model.plan, path):
            continue
        assert kind in ("model", "state")
        if kind == "model" or not path.startswith(plainer):
            tensors[f"model.{path}"] = array
    for leaf, module in folded.items():
        prefix = f"model.{leaf}.product."
        own = {k.removeprefix(prefix): a for k, a in arrays.items() if k.startswith(prefix)}
        tensors[f"model.{leaf}.weight"] = module.folded(arrays[f"model.{leaf}.weight"], own)
    return tensors


def _config(model: TrainedModel, dtype: str) -> dict[str, Any]:
    """Build config.json."""
    plan, tokenizer = model.plan, model.tokenizer
    boundary, module = tokenizer.end_of_text if tokenizer else None, Path(TRANSFORMERS).stem
    return {
        "architectures": ["MinillmForCausalLM"],
        "model_type": OWN_MODEL,
        "auto_map": {
            "AutoConfig": f"{module}.MinillmConfig",
            "AutoModelForCausalLM": f"{module}.MinillmForCausalLM",
        },
        "model_file": MLX,
        "dtype": dtype,
        **sizes_of(plan),
        "max_position_embeddings": plan.config.train.seq_len,
        "tie_word_embeddings": plan.config.model.tied,
        "use_cache": True,
        "bos_token_id": boundary,
        "eos_token_id": boundary,
        "pad_token_id": None,
    }


OWN_DIRECTORY = OwnDirectory()


def write_own(folder: Path, plan: Plan, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a model with its own modeling files into a new folder, without a tokenizer.

    Args:
        folder: is created.
        plan: the model's.
        arrays: ``model.<parameter>`` and ``state.<name>``, as a run has them.

    Raises:
        PlanError: a slot or a plugin cannot be written; contains the reason.
    """
    OWN_DIRECTORY.write(folder, TrainedModel(plan, arrays, None), lambda line: None)
