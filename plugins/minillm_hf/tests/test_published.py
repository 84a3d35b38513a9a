"""Small versions of published models, saved by Transformers: opened, trained, and written back."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from minillm_core import DataError, Refusal, Run
from minillm_core.cli.main import main
from minillm_core.train.generate import Sampling

pytest.importorskip("torch")

VOCAB, ROW = 400, 24
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 64},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


class Published(NamedTuple):
    """A published model: its kind, the keys of its config.json, and the plugins that it needs."""

    kind: str
    config: dict[str, Any]
    plugins: str = ""  # as they are typed
    end_of_text: str = "</s>"


def llama(tied: bool, theta: float, **more: Any) -> dict[str, Any]:
    return {
        **{"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2},
        **{"rms_norm_eps": 1e-5, "tie_word_embeddings": tied, "rope_theta": theta},
        **more,
    }


SCALED = (
    "--plugins llama3_rope llama3_rope.factor=32.0 llama3_rope.high_freq_factor=4.0 "
    "llama3_rope.low_freq_factor=1.0 llama3_rope.original_max_position_embeddings=64"
)
QWEN3 = "--plugins qk_norm qk_norm.gains=true"
MODELS = {
    "Llama 2": Published("Llama", llama(False, 1e4, num_key_value_heads=6)),
    "Llama 3": Published("Llama", llama(False, 5e5), end_of_text="<|end_of_text|>"),
    "Llama 3.1": Published("Llama", llama(False, 5e5, rope=LLAMA3), SCALED, "<|end_of_text|>"),
    "Llama 3.2": Published("Llama", llama(True, 5e5, rope=LLAMA3), SCALED, "<|end_of_text|>"),
    "TinyLlama": Published("Llama", llama(False, 1e4)),
    "SmolLM2": Published(
        "Llama",
        llama(True, 1e5, num_attention_heads=3, num_key_value_heads=1),
        end_of_text="<|endoftext|>",
    ),
    "Llama with YaRN": Published(
        "Llama",
        llama(True, 1e4, rope=YARN),
        "--plugins yarn_rope yarn_rope.beta_fast=32 yarn_rope.beta_slow=1 yarn_rope.factor=4.0 "
        "yarn_rope.original_max_position_embeddings=256 yarn_rope.truncate=true",
    ),
    "Qwen2 0.5B": Published(
        "Qwen2", llama(True, 1e6, rms_norm_eps=1e-6), "--plugins qkv_bias", "<|endoftext|>"
    ),
    "Qwen2.5 7B": Published(
        "Qwen2", llama(False, 1e6, rms_norm_eps=1e-6), "--plugins qkv_bias", "<|im_end|>"
    ),
    "Qwen3 0.6B": Published(
        "Qwen3", llama(True, 1e6, rms_norm_eps=1e-6, head_dim=16), QWEN3, "<|im_end|>"
    ),
    "Qwen3 8B": Published(
        "Qwen3", llama(False, 1e6, rms_norm_eps=1e-6, head_dim=8), QWEN3, "<|endoftext|>"
    ),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("It was a dark and stormy night; the räin fell.\n" * 200, "utf-8")
    return path


def save_tokenizer(folder: Path, token: str) -> None:
    """Save a byte-level tokenizer with an end of text of that name, in Transformers' format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    native = Tokenizer(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", token, "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    native.train_from_iterator(["dark and stormy night"] * 3, trainer)
    PreTrainedTokenizerFast(tokenizer_object=native, eos_token=token).save_pretrained(folder)


@pytest.fixture
def published(tmp_path: Path) -> Callable[[Published], Path]:
    """Save a sharded checkpoint with random weights, biases and norms included, and a tokenizer."""

    def save(model: Published) -> Path:
        import torch
        import transformers

        torch.manual_seed(0)
        config = dict(model.config)
        rope = {"rope_type": "default", **config.pop("rope", {})}
        rope["rope_theta"] = config.pop("rope_theta")
        made = getattr(transformers, f"{model.kind}ForCausalLM")(
            getattr(transformers, f"{model.kind}Config")(
                **{"vocab_size": VOCAB, "intermediate_size": 64, "num_hidden_layers": 2},
                **{"max_position_embeddings": 512, "initializer_range": 0.2},
                **{"rope_parameters": rope, **config},
            )
        )
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "norm" in name or "bias" in name:
                    parameter.add_(torch.randn_like(parameter) / 5)
        folder = tmp_path / "theirs"
        made.save_pretrained(folder, max_shard_size="60KB")
        assert (folder / "model.safetensors.index.json").is_file()
        save_tokenizer(folder, model.end_of_text)
        return folder

    return save


def their_logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    options = {"local_files_only": True, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None]).logits[0].numpy()


FEW = ("--device", "cpu", "--backend", "torch", "--preset", "tiny", f"train.seq_len={ROW}")
FEW += ("train.rows=2", "eval.tokens=100")


def train(folder: Path, text: Path, out: Path, *more: str) -> int:
    place = ("--data", str(text), "--out", str(out), "--init", str(folder))
    return main(["train", *place, *FEW, *more])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_it_opens_trains_and_goes_back(
    name: str, published: Callable[[Published], Path], text: Path, tmp_path: Path
) -> None:
    model = MODELS[name]
    theirs, plugins = published(model), shlex.split(model.plugins)
    ids = np.random.default_rng(1).integers(0, VOCAB, ROW)
    plugins.append("eval.samples=0")  # their logits are compared
    still = ("--steps", "1", "train.lr=1e-30", "train.weight_decay=0.0")
    assert train(theirs, text, tmp_path / "still", *still, *plugins) == 0
    expected = their_logits(theirs, ids)
    assert np.abs(expected).max() > 0.5
    run = Run.open(tmp_path / "still", device="cpu", backend="torch")
    np.testing.assert_allclose(run.logits(ids), expected, atol=1e-4, rtol=0)
    directory = Run.open(theirs, device="cpu", backend="torch")
    np.testing.assert_allclose(directory.logits(ids), expected, atol=1e-4, rtol=0)
    assert directory.tokenizer is not None
    assert run.tokenizer is not None
    assert directory.tokenizer.digest == run.tokenizer.digest
    found = directory.evaluate(text, seq_len=ROW, max_tokens=500)
    assert found.val_loss == pytest.approx(run.evaluate(text, max_tokens=500).val_loss, abs=1e-4)
    assert run.tokenizer.decode([run.tokenizer.end_of_text], specials=True) == model.end_of_text

    assert train(theirs, text, tmp_path / "run", "--steps", "5", *plugins) == 0
    run = Run.open(tmp_path / "run", device="cpu", backend="torch")
    result = run.export(tmp_path / "back", shard_bytes=60_000)
    assert result["layout"] == model.kind.lower()
    trained = run.logits(ids)
    assert np.abs(trained - expected).max() > 1e-3
    np.testing.assert_allclose(their_logits(tmp_path / "back", ids), trained, atol=1e-4, rtol=0)
    run.export(tmp_path / "half", dtype="bfloat16")
    half = their_logits(tmp_path / "half", ids)
    assert 1e-6 < np.abs(half - trained).max() < 0.05 * np.abs(trained).max()
    card = (tmp_path / "half" / "README.md").read_text()
    assert "parameters in bfloat16" in card
    assert "trained with minillm" in card
    assert "| training | 5 steps" in card
    assert str(tmp_path) not in card.replace(str(tmp_path / "half"), "")
    eos = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())["eos_token"]
    assert eos == model.end_of_text


@pytest.mark.parametrize("name", ["Llama 3.2", "Llama with YaRN", "Qwen2.5 7B", "Qwen3 0.6B"])
def test_what_it_needs_is_said_before_anything_is_read(
    name: str,
    published: Callable[[Published], Path],
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = published(MODELS[name])
    capsys.readouterr()
    assert train(folder, text, tmp_path / "out", "--steps", "1") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert MODELS[name].plugins in said
    assert main(["plan", "--init", str(folder), "--preset", "tiny", "--device", "cpu"]) == 2
    assert MODELS[name].plugins in " ".join(capsys.readouterr().err.split())
    words = shlex.split(MODELS[name].plugins)
    assert main(["plan", "--init", str(folder), "--preset", "tiny", "--device", "cpu", *words]) == 0
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "cache").exists()  # the text is not tokenised first


def test_a_directory_is_read_as_it_is(
    published: Callable[[Published], Path],
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, here = str(published(MODELS["Qwen3 0.6B"])), ("--device", "cpu", "--backend", "torch")
    capsys.readouterr()
    assert main(["eval", folder, "--data", str(text), "--max-tokens", "300", "--json", *here]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["step"], found["checkpoint"]) == (300, 0, folder)
    assert found["bits_per_byte"] > 1
    greedy = ("--temperature", "0", "--max-tokens", "5", "--json")
    assert main(["generate", folder, "It was", *greedy, *here]) == 0
    ids = json.loads(capsys.readouterr().out)["ids"]
    run = Run.open(folder, device="cpu")
    assert run.tokenizer is not None
    row = [run.tokenizer.end_of_text, *run.tokenizer.encode(["It was"])[0], *ids]
    known = run.tokenizer.used_ids()  # the other rows of the embedding are unused
    theirs = known[their_logits(Path(folder), np.array(row))[:, known].argmax(-1)]
    assert theirs[-len(ids) - 1 : -1].tolist() == ids
    assert main(["export", folder, "--to", str(tmp_path / "again")]) == 0
    assert f"parameters in float32, as it is in {folder}\n" in capsys.readouterr().out
    assert "written by minillm" in (tmp_path / "again" / "README.md").read_text()
    for words, said in (
        (("eval", folder, "--data", str(text), "--best"), "has no checkpoints to choose from"),
        (("eval", str(tmp_path), "--data", str(text)), "holds no run"),
    ):
        assert main(words) == 2
        assert said in " ".join(capsys.readouterr().err.split()), words
    with pytest.raises(Refusal, match="not a run, so it cannot be resumed"):
        run.train()


TINY = ("model.layers=2", "model.dim=64", "model.heads=4", "model.kv_heads=2", "model.hidden=128")
TINY += ("model.vocab=300", "train.seq_len=32", "train.rows=4", "eval.tokens=2000")
TINY += ("eval.samples=0",)


def held_out(out: Path) -> list[float]:
    events = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [event["val_loss"] for event in events if event["event"] == "eval"]


@pytest.mark.slow
def test_a_trained_model_is_not_made_worse(text: Path, tmp_path: Path) -> None:
    words = [
        "night",
        "rain",
        "wind",
        "storm",
        "dark",
        "the",
        "a",
        "fell",
        "rose",
        "and",
        "or",
        "was",
    ]
    rng = np.random.default_rng(0)
    lines = (" ".join(rng.choice(words, 12)) for _ in range(3000))
    text.write_text("\n".join(lines), "utf-8")
    place = ("--data", str(text), "--preset", "cpu", "--device", "cpu", "--backend", "torch", *TINY)
    none = (
        "--plugins",
        "-bigram_hash,-half_rope,-key_offset,-muon,-value_embeds",
        "train.lr=0.01",
    )
    base, to = tmp_path / "base", str(tmp_path / "model")
    assert main(["train", *place, *none, "--steps", "300", "--out", str(base)]) == 0
    assert main(["export", str(base), "--to", to]) == 0
    shape = [word for word in place if not word.startswith("model.")]
    tuned = tmp_path / "tuned"
    assert main(["train", *shape, "--init", to, "--steps", "60", "--out", str(tuned)]) == 0
    first, *_, last = held_out(tuned)
    assert first == pytest.approx(held_out(base)[-1], abs=0.02)
    assert last < first + 0.01
    record = json.loads((tuned / "run.json").read_text())
    rate = record["config"]["train"]["lr"]
    assert (rate["value"], rate["origin"]) == (3e-4, f"--init {to}")
    assert record["plugins"] == []  # the preset's are for training from scratch


def test_the_plugins_of_a_preset_are_left_out_and_that_is_said(
    published: Callable[[Published], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = published(MODELS["TinyLlama"])
    here = ("plan", "--init", str(folder), "--preset", "cpu", "--device", "cpu")
    for words, left in (
        ((), "bigram_hash, half_rope, key_offset, muon, shuffle_rows, value_embeds"),
        (
            ("--plugins", "muon"),
            "bigram_hash, half_rope, key_offset, muon, shuffle_rows, value_embeds",
        ),
        (
            ("--plugins", "-muon"),
            "bigram_hash, half_rope, key_offset, shuffle_rows, value_embeds",
        ),
    ):
        capsys.readouterr()
        assert main([*here, *words, "--json"]) == 0
        out, err = capsys.readouterr()
        assert f"are left out: {left};" in " ".join(err.split())
        named = [one["name"] for one in json.loads(out)["plugins"]]
        assert named == (["muon"] if words == ("--plugins", "muon") else [])


def test_gpt2_is_refused_with_the_reason(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=VOCAB, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "theirs")
    capsys.readouterr()
    assert train(tmp_path / "theirs", text, tmp_path / "out", "--steps", "1") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "it has learned positions, LayerNorm and biases in every product" in said
    assert "LlamaForCausalLM or Qwen2ForCausalLM or Qwen3ForCausalLM" in said
    assert "minillm train --preset gpt2-124m" in said


def test_a_text_begins_as_the_tokenizer_says_and_ends_as_it_says(
    published: Callable[[Published], Path], text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory's texts begin with Llama's bos; a run that starts from it begins them with eos."""
    folder = published(MODELS["Llama 2"])
    bos = {"bos_token": "<unk>", "add_bos_token": True}  # any token but the end of text
    path = folder / "tokenizer_config.json"
    plain = Run.open(folder, device="cpu")
    assert plain.tokenizer is not None
    assert plain.tokenizer.start == plain.tokenizer.end_of_text
    before = plain.evaluate(text, max_tokens=20).val_loss
    path.write_text(json.dumps(json.loads(path.read_text()) | bos))
    run = Run.open(folder, device="cpu")
    tokenizer = run.tokenizer
    assert tokenizer is not None
    assert (tokenizer.start_token, tokenizer.end_of_text_token) == ("<unk>", "</s>")
    ids = np.array([tokenizer.start, *tokenizer.encode([text.read_text("utf-8")])[0]])[:21]
    nats = run.losses([ids])[0].mean()
    found = run.evaluate(text, max_tokens=20)
    assert found.val_loss == pytest.approx(nats, abs=1e-5)
    assert found.val_loss != pytest.approx(before, abs=1e-4)
    drawn = run.writer().generate("It", Sampling(), tokens=3)
    assert drawn.new[0] == tokenizer.start
    assert drawn.ends == {tokenizer.end_of_text}
    run.export(folder.parent / "again")
    written = json.loads((folder.parent / "again" / "tokenizer_config.json").read_text())
    assert (written["bos_token"], written["eos_token"]) == ("<unk>", "</s>")
    again = Run.open(folder.parent / "again", device="cpu")
    assert again.evaluate(text, max_tokens=20).val_loss == pytest.approx(found.val_loss, abs=1e-6)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": "<nosuch>"}))
    with pytest.raises(DataError, match="with which its texts begin"):
        _ = Run.open(folder).tokenizer


INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DRAWN = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "min_p": 0.1}
GENERATION = DRAWN | {"eos_token_id": [1, 0], "top_k": "many", "max_length": 9}


@pytest.fixture
def instruct(published: Callable[[Published], Path]) -> Path:
    """Save a model with a chat template, two tokens that end a text, and sampling settings."""
    from tokenizers import Tokenizer

    folder = published(MODELS["SmolLM2"]._replace(end_of_text="<|im_end|>"))
    native = Tokenizer.from_file(str(folder / "tokenizer.json"))
    native.add_special_tokens(["<|im_start|>", "<s>"])
    native.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": "<s>"}))
    (folder / "chat_template.jinja").write_text(INSTRUCT)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [1, 0]}))
    return folder


def chat(folder: Path) -> tuple[str, list[int]]:
    """Render a chat by a directory's template; return its text, and its ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    told = [{"role": "user", "content": "It was?"}]
    text = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    return text, tokenizer.encode(text, add_special_tokens=False)


def test_a_directory_that_is_exported_as_it_is_keeps_its_files(
    instruct: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (instruct / "merges.txt").write_bytes(b"\xff")
    assert main(["export", str(instruct), "--to", str(tmp_path / "to")]) == 0
    written, theirs = ({p.name for p in f.iterdir()} for f in (tmp_path / "to", instruct))
    shards = {name for name in theirs if name.startswith("model")}
    assert written == theirs - shards | {"README.md", "model.safetensors"}
    for name in written & theirs - shards - {"config.json"}:
        assert (tmp_path / "to" / name).read_bytes() == (instruct / name).read_bytes(), name
    config, before = (
        json.loads((f / "config.json").read_text()) for f in (tmp_path / "to", instruct)
    )
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert config[key] == before[key]
    assert chat(tmp_path / "to") == chat(instruct)
    assert "the tokenizer puts it there" not in (tmp_path / "to" / "README.md").read_text()
    assert "left out" not in capsys.readouterr().err


def test_what_programs_read_beside_the_weights_travels_with_the_model(
    instruct: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(instruct, text, tmp_path / "run", "--steps", "1") == 0

    def export(name: str) -> tuple[dict[str, Any], dict[str, Any], str]:
        capsys.readouterr()
        assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / name)]) == 0
        names = ("generation_config.json", "tokenizer_config.json")
        found = [json.loads((tmp_path / name / one).read_text()) for one in names]
        return found[0], found[1], " ".join(capsys.readouterr().err.split())

    found, _, said = export("to")
    ids = {"bos_token_id": 1, "eos_token_id": [1, 0], "pad_token_id": 1}
    assert found == ids | DRAWN
    assert chat(tmp_path / "to") == chat(instruct)  # which begins with <s>
    assert "left out" not in said
    save_tokenizer(instruct, "<|another|>")
    found, tokenizer, said = export("other")
    assert (found, "chat_template" in tokenizer) == (ids | DRAWN | {"eos_token_id": 1}, False)
    assert f"stop tokens of {instruct} are left out: the tokenizer is another" in said
    instruct.rename(tmp_path / "gone")
    found, tokenizer, said = export("alone")
    assert (found, tokenizer["split_special_tokens"]) == (ids | {"eos_token_id": 1}, True)
    assert f"chat template, stop tokens and sampling settings of {instruct} are left out" in said
