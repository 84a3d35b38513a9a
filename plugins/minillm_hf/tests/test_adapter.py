"""PEFT adapters are read with their base; other features than LoRA are refused with a fix."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from minillm_core import Refusal, Run
from minillm_hf.adapter import read_adapter

SHAPE = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16},
}
WARNS = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # PEFT 0.21's


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """Save a Transformers base and a PEFT adapter with random weights; return its folder and the model."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("adapters")

    def make(name: str, **lora: Any) -> tuple[Path, Any]:
        torch.manual_seed(1)
        base = LlamaForCausalLM(LlamaConfig(**SHAPE))
        base.save_pretrained(folder / f"{name}-base")
        base = LlamaForCausalLM.from_pretrained(folder / f"{name}-base", dtype=torch.float32)
        model = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=7, **lora))
        for key, one in model.named_parameters():
            if "lora_" in key:
                one.data.normal_(std=0.3)
        model.save_pretrained(folder / name)
        return folder / name, model.eval()

    return make


@pytest.mark.slow
@WARNS
@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": "all-linear", "use_rslora": True},
        {"target_modules": ["down_proj"], "layers_to_transform": [1], "lora_dropout": 0.1},
    ],
)
def test_an_adapter_of_peft_gives_its_logits(
    made: Callable[..., tuple[Path, Any]], lora: dict[str, Any], tmp_path: Path
) -> None:
    import torch

    folder, model = made(tmp_path.name, **lora)
    run = Run.open(folder, device="cpu")
    ids = np.random.default_rng(0).integers(0, 97, 14)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    np.testing.assert_allclose(run.logits(ids), expected, atol=2e-5, rtol=0)
    assert read_adapter(folder).digest != read_adapter(folder).base.digest


def changed(folder: Path, **config: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def shapes(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@WARNS
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda at: changed(at, peft_type="IA3"), "merge_and_unload"),
        (lambda at: changed(at, use_dora=True), "an adapter with use_dora"),
        (lambda at: changed(at, modules_to_save=["embed_tokens"]), "save_pretrained"),
        (lambda at: changed(at, rank_pattern={"q_proj": 8}), "rank_pattern"),
        (lambda at: changed(at, bias="all"), "an adapter with bias"),
        (lambda at: changed(at, init_lora_weights="pissa"), "init_lora_weights"),
        (lambda at: changed(at, new_key_of_2027=[1]), "new_key_of_2027"),
        (lambda at: changed(at, r=0), "is not a rank"),
        (lambda at: changed(at, r=True), "is not a rank"),
        (lambda at: changed(at, lora_alpha=1e999), "cannot be read"),
        (lambda at: changed(at, lora_alpha="7"), "is not a factor"),
        (lambda at: changed(at, r=4), "has the shapes"),
        (lambda at: changed(at, base_model_name_or_path=None), "does not say which model"),
        (lambda at: changed(at, revision=5), "is not a branch, tag or commit"),
        (lambda at: changed(at, base_model_name_or_path="./a", revision="b"), "not here: ./a@b"),
        (lambda at: changed(at, base_model_name_or_path="/no\\where"), "is not here"),
        (lambda at: changed(at, base_model_name_or_path="a\0b"), "does not say which model"),
        (lambda at: changed(at, base_model_name_or_path=str(at)), "is not here"),
        (lambda at: shapes(at, lambda t: t.pop(FIRST)), "has the shapes"),
        (lambda at: shapes(at, lambda t: t.update(x=t[FIRST])), "changes nothing"),
        (
            lambda at: shapes(at, lambda t: t.update({FIRST: t[FIRST].astype("f8")})),
            "is of dtype F64",
        ),
        (lambda at: shapes(at, lambda t: t.clear()), "has no tensors"),
    ],
)
def test_what_is_no_plain_adapter_is_refused(
    made: Callable[..., tuple[Path, Any]],
    tmp_path: Path,
    change: Callable[[Path], Any],
    said: str,
) -> None:
    folder, _ = made(tmp_path.name, target_modules=["q_proj"])
    change(folder)
    with pytest.raises(Refusal) as error:
        read_adapter(folder)
    assert said in str(error.value)
    assert error.value.fix


@WARNS
def test_a_pickled_adapter_is_not_read(
    made: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "run",))

    folder, _ = made(tmp_path.name, target_modules=["q_proj"])
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(Refusal, match="a pickle, which may run code, and is not read"):
        read_adapter(folder)
    assert not (tmp_path / "run").exists()
