"""Writing PEFT adapters: the parameters trained by the plugin ``lora``, without the base model.

    adapter_config.json
    adapter_model.safetensors       base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
    tokenizer.json                  with tokenizer_config.json and generation_config.json

The base is the model directory that the run was started from, or the model of the hub with its commit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core import Plan, PlanError, Refusal
from minillm_core.commands import few
from minillm_core.directories import DirectoryFormat, ModelDirectory, TrainedModel
from minillm_hf.adapter import ADAPTER_WEIGHTS, read_adapter
from minillm_hf.directory import check_dtype, config_of, documents_of
from minillm_hf.hub import published
from minillm_hf.layouts import products
from minillm_hf.lora import LowRank
from minillm_hf.match import export_layout
from minillm_hf.origin import started_from
from minillm_hf.read import ADAPTER_CONFIG, CONFIG, read_model_directory
from minillm_hf.write import SHARD_BYTES, write_directory


class PEFT(DirectoryFormat):
    """Directories with an adapter_config.json, of LoRA."""

    def recognises(self, path: Path) -> bool:
        """Return whether the path is a folder with an adapter and no config.json."""
        return (path / ADAPTER_CONFIG).is_file() and not (path / CONFIG).exists()

    def read(self, path: Path) -> ModelDirectory:
        """Read and validate an adapter and its base, as one model with the change folded in."""
        return read_adapter(path)

    def check(self, plan: Plan) -> None:
        """Check that a plan trains exactly the adapters of ``lora``, on a model with a layout.

        A run that was started from an adapter has that one folded into its frozen weights, which are in no
        directory that PEFT could load the new adapter on.
        """
        export_layout(plan)
        _adapters(plan)
        if plan.config.init is not None and self.recognises(Path(plan.config.init)):
            raise PlanError(
                "the run was started from an adapter, and PEFT would load its own adapter without that "
                "first one",
                where=f"init={plan.config.init}",
                fix="leave the layout out: the whole model is exported, with both adapters folded in",
            )

    def write(
        self,
        folder: Path,
        model: TrainedModel,
        say: Callable[[str], None],
        *,
        shard_bytes: int = SHARD_BYTES,
        dtype: str = "float32",
    ) -> int:
        """Write adapter_config.json, the adapters in one safetensors file, and the tokenizer."""
        check_dtype(dtype)
        plan, (base, revision) = model.plan, _base(model, say)
        if base is None:
            say("the run was not started from a model directory: PEFT has to be given the base")
        tensors = dict(_tensors(plan, model.arrays))
        documents = documents_of(config_of(model), model, say)
        del documents[CONFIG]
        documents[ADAPTER_CONFIG] = _config(plan, base, revision)
        write_directory(
            folder,
            tensors,
            documents,
            shard_bytes=sum(array.nbytes for array in tensors.values()),  # PEFT reads one file
            dtype=dtype,
            weights=ADAPTER_WEIGHTS,
        )
        return sum(array.size for array in tensors.values())

    def loading(self, folder: str) -> Mapping[str, str]:
        """Return how PEFT loads the folder."""
        return {"PEFT": f"PeftModel.from_pretrained(model, {json.dumps(folder)})"}


def _base(model: TrainedModel, say: Callable[[str], None]) -> tuple[str | None, str | None]:
    """Return the base of a run's adapters and, for a model of the hub, its commit; None: unknown.

    Raises:
        Refusal: its files are no longer those that the run was started from.
    """
    if (folder := started_from(model)) is None:
        return None, None
    if (found := published(folder)) is not None:
        name, _, commit = found.partition("@")
        return name, commit
    kept = (model.record.get("initial") or {}).get("digest")
    if not (folder / CONFIG).is_file():
        say(f"the base of the adapter is not here: PEFT will look for {folder}")
    elif kept is not None and read_model_directory(folder).digest != kept:
        raise Refusal(
            "the base has changed since the run was started from it: the adapter would make another model "
            "of it",
            where=str(folder),
            fix="put its files back as they were; or leave the layout out: the whole model is exported",
        )
    return str(folder), None


def _adapters(plan: Plan) -> dict[str, LowRank]:
    """Map linear layers to their adapters, all with the same rank and alpha.

    Raises:
        PlanError: the plan has no adapters, or trains other parameters too.
    """
    found = products(plan)
    alike = {(one.rank, one.alpha) for one in found.values() if isinstance(one, LowRank)}
    if len(alike) != 1 or not all(isinstance(one, LowRank) for one in found.values()):
        raise PlanError(
            "the layout peft writes LoRA adapters only, and this model has none, or other modules besides",
            where="plugins: " + (", ".join(one.name for one in plan.plugins) or "none"),
            fix="leave the layout out: the whole model is exported",
        )
    trained = [one for one in plan.parameters if one not in plan.frozen and ".product." not in one]
    if trained:
        raise PlanError(
            f"the layout peft is of adapters alone, and {few(trained)} is trained too (lora.train)",
            where="plugins: lora",
            fix="leave the layout out: the whole model is exported",
        )
    return found


def _modules(plan: Plan) -> dict[str, str]:
    """Map linear layers to their module names in Transformers."""
    tensors = export_layout(plan).tensors(plan.config.model)
    names = {tensor.place: name for name, tensor in tensors.items()}
    return {leaf: names[f"{leaf}.weight"].removesuffix(".weight") for leaf in _adapters(plan)}


def _tensors(plan: Plan, arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the adapters' tensors, float32, by their names in PEFT."""
    for leaf, module in _modules(plan).items():
        for ours, theirs in (("a", "lora_A"), ("b", "lora_B")):
            yield (
                f"base_model.model.{module}.{theirs}.weight",
                arrays[f"model.{leaf}.product.{ours}"],
            )


def _config(plan: Plan, base: str | None, revision: str | None) -> dict[str, Any]:
    """Build adapter_config.json."""
    modules, first = _modules(plan), next(iter(_adapters(plan).values()))
    layers = sorted({int(leaf.split(".")[1]) for leaf in modules})
    every = layers == list(range(plan.config.model.layers))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": first.rank,
        "lora_alpha": int(first.alpha) if first.alpha.is_integer() else first.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules.values()}),
        "layers_to_transform": None if every else layers,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }


PEFT_ADAPTER = PEFT()
