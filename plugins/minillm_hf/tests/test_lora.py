"""LoRA: the base stays bit-identical, only adapters are trained, and the export computes the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import Plan, PlanError, PluginError, Refusal, Run
from minillm_core.backends.base import lone_row
from minillm_core.checkpoint.commit import commit
from minillm_core.cli.main import main
from minillm_core.config.load import load
from minillm_core.inspection import Member, groups_of
from minillm_core.plan import build_plan
from minillm_core.plugins.manager import load as load_plugins
from minillm_core.train.record import Record
from minillm_core.train.settings import settings as settings_of
from minillm_hf import HUGGING_FACE
from minillm_hf.directory import longest_row
from minillm_hf.lora import LowRank
from minillm_hf.peft import PEFT_ADAPTER
from minillm_kit.subject import after, rows, supervised, traced_trainer, trainer

Arrays = dict[str, np.ndarray]

VOCAB, ROW = 97, 12
SMALL = {
    **{"model.layers": 2, "model.dim": 32, "model.heads": 4, "model.kv_heads": 2},
    **{"model.hidden": 48, "model.vocab": VOCAB, "train.rows": 2, "train.seq_len": ROW},
    **{"train.compile": "off", "train.clip": 0.0, "train.steps": 20},
}
BACKENDS = ("torch", "mlx")


def planned(plugins: str | None = "lora", **changed: Any) -> Plan:
    values = SMALL | {key.replace("__", "."): value for key, value in changed.items()}
    loaded = load(
        preset="tiny",
        plugins=plugins,
        assignments=[f"{key}={json.dumps(value)}" for key, value in values.items()],
        default_preset=lambda: ("tiny", "test"),
    )
    plan = build_plan(loaded.config, load_plugins(loaded.specs, loaded.config.plugins))
    return replace(plan, settings=loaded)


def random_weights(plan: Plan, *, adapters: bool = True) -> Arrays:
    """Return random weights far from their initial values; a parameter's depend on its name alone."""
    found = {}
    for name, info in plan.parameters.items():
        random = np.random.default_rng([*name.encode()])
        array = 0.2 * random.standard_normal(info.shape) + (info.role == "norm")
        if adapters or not info.role.startswith("lora."):
            found[f"model.{name}"] = array.astype(np.float32)
    return found


def steps(run: Any, plan: Plan, first: int, last: int) -> None:
    batches = rows(plan.config, last)
    for index in range(first, last):
        values = plan.values((index + 1) / (plan.config.train.steps or 1))
        run.read(run.step([batches[index]], values, supervised([batches[index]])))


def adapters(plan: Plan) -> set[str]:
    return {name for name, info in plan.parameters.items() if info.role.startswith("lora.")}


@pytest.mark.parametrize("compiled", ["off", pytest.param("on", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_base_stays_bit_by_bit_and_adapters_alone_have_state(
    backend: str, dtype: str, compiled: str
) -> None:
    pytest.importorskip({"torch": "torch", "mlx": "mlx.core"}[backend])
    plan = planned(train__dtype=dtype, train__compile=compiled)
    trained = adapters(plan)
    assert plan.frozen == plan.parameters.keys() - trained
    assert len(trained) == 2 * 7 * 2
    run = traced_trainer(plan, backend)
    start = run.arrays() | random_weights(plan)
    run.load(start)
    steps(run, plan, 0, 3)
    middle = run.arrays()
    steps(run, plan, 3, 5)
    end = run.arrays()
    moved = {
        name
        for name in plan.parameters
        if not np.array_equal(end[f"model.{name}"], start[f"model.{name}"])
    }
    assert moved == trained
    for name in plan.frozen:
        assert end[f"model.{name}"].tobytes() == start[f"model.{name}"].tobytes()
    entries = {k for k in end if k.startswith("optimizer.")} - {"optimizer.updates"}
    assert entries == {f"optimizer.precondition.{e}.{name}" for e in "mv" for name in trained}
    again = traced_trainer(plan, backend)
    again.resume(middle)
    steps(again, plan, 3, 5)
    for name, array in again.arrays().items():
        if not name.startswith("random."):
            assert array.tobytes() == end[name].tobytes(), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_get_the_gradients_that_they_would_get_beside_trained_weights(
    backend: str, tied: bool
) -> None:
    """Only the products that compute gradients of frozen weights are omitted."""
    pytest.importorskip({"torch": "torch", "mlx": "mlx.core"}[backend])
    plan = planned(model__tied=tied, train__checkpointing=tied)
    rule = plan.groups[0].rule
    members = (Member(name, p.shape, 1.0, 1.0) for name, p in plan.parameters.items())
    whole = replace(plan, groups=groups_of({one.name: (rule, one) for one in members}))
    moments = []
    for one in (plan, whole):
        run = trainer(one, backend)
        run.load(run.arrays() | random_weights(one))
        steps(run, one, 0, 1)
        moments.append(after("optimizer.precondition.m.", run.arrays()))
    assert moments[1].keys() == plan.parameters.keys()
    for name, moment in moments[0].items():
        assert np.any(moment)
        np.testing.assert_allclose(moment, moments[1][name], rtol=1e-5, atol=1e-8)


@given(
    sizes=st.tuples(*[st.integers(1, 9)] * 4),
    alpha=st.floats(0.01, 64),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=30, deadline=None)
def test_a_folded_weight_multiplies_as_the_two_products_do(
    sizes: tuple[int, int, int, int], alpha: float, seed: int
) -> None:
    rows_, taken, made, rank = sizes
    random = np.random.default_rng(seed)
    own = {
        "a": random.standard_normal((rank, taken)).astype(np.float32),
        "b": random.standard_normal((made, rank)).astype(np.float32),
    }
    x = random.standard_normal((rows_, taken))
    weight = random.standard_normal((made, taken)).astype(np.float32)
    folded = LowRank(taken, made, rank, alpha, 1.0).folded(weight, own)
    assert folded.dtype == np.float32
    expected = x @ weight.T + alpha / rank * (x @ own["a"].T) @ own["b"].T
    np.testing.assert_allclose(x @ folded.T, expected, rtol=1e-4, atol=1e-4 * (1 + alpha))


def leave_run(out: Path, plugins: str | None = "lora", **changed: Any) -> Path:
    """Write the run folder that training would leave behind, without training."""
    plan = planned(plugins, **changed)
    out.mkdir()
    commit(out, 7, random_weights(plan), {"tokenizer": None})
    assert plan.settings is not None
    entries = [
        {"name": one.name, "distribution": one.distribution, "source": plugins}
        for one in plan.plugins
    ]
    Record(out, {"config": settings_of(plan.settings), "plan_hash": plan.hash, "plugins": entries})
    return out


def logits(model: Any) -> np.ndarray:
    random = np.random.default_rng(5)
    ids = [random.integers(0, VOCAB, length) for length in (1, 3, ROW)]
    return np.stack([model.next_logits(lone_row(one)) for one in ids])


@pytest.mark.parametrize(
    ("plugins", "changed", "layout"),
    [
        ("lora", {}, "llama"),
        (
            "lora",
            {"model__tied": False, "lora__targets": ["q", "down"], "lora__layers": [1]},
            "llama",
        ),
        ("lora,qk_norm", {"qk_norm__gains": True, "lora__alpha": 3.5, "lora__rank": 3}, "qwen3"),
        ("lora,qkv_bias", {}, "qwen2"),
    ],
)
def test_a_merged_export_gives_the_logits_of_base_and_adapters(
    tmp_path: Path, plugins: str, changed: dict[str, Any], layout: str
) -> None:
    run = Run.open(leave_run(tmp_path / "run", plugins, **changed), device="cpu")
    result = run.export(tmp_path / "to")
    assert result["layout"] == layout
    plain = Run.open(tmp_path / "to", device="cpu")
    assert "lora" not in [one.name for one in plain.plan.plugins]
    expected = logits(run._reader(exact=True))
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits(plain._reader(exact=True)), expected, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT 0.21's
@pytest.mark.parametrize(
    ("plugins", "changed"),
    [
        ("lora", {"model__tied": False}),
        ("lora", {"lora__targets": ["q", "v"], "lora__layers": [1], "lora__alpha": 3.5}),
        ("lora,qkv_bias", {"lora__rank": 2}),
    ],
)
def test_an_adapter_gives_the_same_logits_in_peft(
    tmp_path: Path, plugins: str, changed: dict[str, Any]
) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    from transformers import AutoModelForCausalLM

    base = plugins.partition(",")[2] or None
    unchanged = {key: value for key, value in changed.items() if not key.startswith("lora")}
    Run.open(leave_run(tmp_path / "base", base, **unchanged)).export(tmp_path / "model")
    run = Run.open(leave_run(tmp_path / "run", plugins, **changed), device="cpu")
    result = run.export(tmp_path / "adapter", layout="peft")
    assert result["layout"] == "peft"
    assert result["loading"].keys() == {"PEFT"}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= result["files"].keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(loaded, tmp_path / "adapter").eval()
    held = {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert len(held) == len(adapters(run.plan))

    class Theirs:
        def next_logits(self, batch: dict[str, np.ndarray]) -> np.ndarray:
            with torch.no_grad():
                return model(torch.from_numpy(batch["ids"]).long()).logits[0, -1].numpy()

    expected = logits(run._reader(exact=True))
    np.testing.assert_allclose(logits(Theirs()), expected, atol=1e-5, rtol=0)


def test_an_export_keeps_the_positions_of_its_start_where_they_turn_the_same(
    tmp_path: Path,
) -> None:
    def config(name: str) -> dict[str, Any]:
        return json.loads((tmp_path / name).read_text())

    Run.open(leave_run(tmp_path / "base", None)).export(tmp_path / "model")
    longer = config("model/config.json") | {"max_position_embeddings": 8192}
    (tmp_path / "model" / "config.json").write_text(json.dumps(longer))
    Run.open(leave_run(tmp_path / "run")).export(tmp_path / "adapter", layout="peft")
    based = config("adapter/adapter_config.json")
    based |= {"base_model_name_or_path": str(tmp_path / "model")}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(based))
    (tmp_path / "adapter" / "generation_config.json").unlink()  # that of the base applies
    (tmp_path / "model" / "generation_config.json").write_text('{"min_p": 0.1}')
    for name in ("model", "adapter"):
        Run.open(tmp_path / name, device="cpu").export(tmp_path / f"{name}-again")
        assert config(f"{name}-again/generation_config.json") == {"min_p": 0.1}
        assert config(f"{name}-again/config.json")["max_position_embeddings"] == 8192
        start = str(tmp_path / name)
        assert longest_row(planned(init=start)) == 8192
        assert longest_row(planned(init=start, train__seq_len=9000)) == 9000
        assert longest_row(planned(init=start, model__rope_base=5e5)) == ROW
        assert longest_row(planned("lora,yarn_rope", init=start)) == ROW
    (tmp_path / "model" / "config.json").unlink()
    for name in ("model", "adapter", "base", "nowhere"):
        assert longest_row(planned(init=str(tmp_path / name))) == ROW
    assert longest_row(planned()) == ROW


@pytest.mark.slow
def test_a_directory_is_tuned_by_adapters_and_names_itself_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    shape = [f"{k}={v}" for k, v in SMALL.items() if k.startswith("model.")]
    runs, common = tmp_path / "runs", ["--data", str(text), "--device", "cpu", "train.rows=2"]
    common += ["train.seq_len=12", "--steps", "3", "eval.tokens=100", "eval.samples=0"]
    shape[[s.startswith("model.vocab") for s in shape].index(True)] = "model.vocab=300"
    assert main(["train", "--out", str(runs / "a"), *common, *shape]) == 0
    model = tmp_path / "model"
    assert main(["export", str(runs / "a"), "--to", str(model)]) == 0
    tuned = ["train", "--init", str(model), "--plugins", "lora", "--out", str(runs / "b"), *common]
    assert main(tuned) == 0
    said = capsys.readouterr()
    assert "trained and" in said.out + said.err
    assert "frozen parameters keep their random initial values" not in said.out + said.err
    resumed = ["train", "--resume", "--out", str(runs / "b"), "--steps", "4"]
    assert main(resumed) == 0
    said = capsys.readouterr()
    assert "frozen parameters keep their random initial values" not in said.out + said.err
    again = ["--plugins", "lora", "--out", str(runs / "c"), *common, *shape]
    assert main(["train", *again]) == 0
    said = capsys.readouterr()
    assert "frozen parameters keep their random initial values" in said.out + said.err
    assert main(["export", str(runs / "b"), "--to", str(tmp_path / "c"), "--layout", "peft"]) == 0
    assert "PeftModel.from_pretrained" in capsys.readouterr().out
    config = json.loads((tmp_path / "c" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model)
    assert (config["r"], config["lora_alpha"], config["layers_to_transform"]) == (16, 32, None)
    assert (tmp_path / "c" / "tokenizer.json").is_file()
    evaluated = []
    for one in (runs / "b", tmp_path / "c"):  # the adapter is read with its base
        assert main(["eval", str(one), "--data", str(text), "--max-tokens", "500", "--json"]) == 0
        evaluated.append(json.loads(capsys.readouterr().out)["val_loss"])
    assert evaluated[0] == pytest.approx(evaluated[1], abs=1e-5)
    assert main(["train", "--init", str(tmp_path / "c"), "--out", str(runs / "d"), *common]) == 0
    assert "the adapter is folded into the weights of" in capsys.readouterr().err
    digest = json.loads((runs / "d" / "run.json").read_text())["initial"]["digest"]
    assert digest not in (
        None,
        json.loads((runs / "b" / "run.json").read_text())["initial"]["digest"],
    )
    theirs, ours = (Run.open(one, device="cpu").export for one in (model, runs / "b"))
    theirs(tmp_path / "e")
    ours(tmp_path / "f")
    sizes = [(tmp_path / n / "model.safetensors").stat().st_size for n in "ef"]
    assert sizes[0] == sizes[1]
    again = ["export", str(runs / "b"), "--layout", "peft", "--to", str(tmp_path / "g")]
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    assert main(again) == 2
    assert "the base has changed since the run was started from it" in capsys.readouterr().err
    shutil.rmtree(model)
    assert main(again) == 0
    assert "the base of the adapter is not here" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("plugins", "changed", "layout", "said"),
    [
        (None, {}, "peft", "writes LoRA adapters only, and this model has none"),
        ("lora", {}, "nosuch", "cannot be written in layout nosuch"),
        ("lora,qk_norm", {"qk_norm__gains": True}, "llama", "cannot be written in layout llama"),
    ],
)
def test_a_layout_that_a_model_cannot_have_is_refused(
    tmp_path: Path, plugins: str | None, changed: dict[str, Any], layout: str, said: str
) -> None:
    run = Run.open(leave_run(tmp_path / "run", plugins, **changed))
    with pytest.raises(PlanError, match=said):
        run.export(tmp_path / "to", layout=layout)
    assert not (tmp_path / "to").exists()


def test_an_adapter_is_no_base_of_another(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    (first / "adapter_config.json").write_text("{}")
    run = Run.open(leave_run(tmp_path / "run", init=str(first)))
    with pytest.raises(PlanError, match=f"started from an adapter.*\n.*init={first}\n.*the whole"):
        run.export(tmp_path / "to", layout="peft")


def test_a_dtype_that_is_none_is_refused_for_adapters_too(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="float8"):
        Run.open(leave_run(tmp_path / "run")).export(tmp_path / "to", layout="peft", dtype="float8")


@pytest.mark.parametrize("targets", [[], ["q", "q"], ["head"]])
def test_targets_are_matrices_each_once(targets: list[str]) -> None:
    with pytest.raises(PluginError, match="targets"):
        planned(lora__targets=targets)


@pytest.mark.parametrize("backend", BACKENDS)
def test_beside_muon_the_base_is_frozen_and_the_adapters_follow_muon(backend: str) -> None:
    pytest.importorskip({"torch": "torch", "mlx": "mlx.core"}[backend])
    plan = planned("lora,muon")
    trained = adapters(plan)
    assert plan.frozen == plan.parameters.keys() - trained
    assert {one.name for g in plan.groups if g.rule.name == "muon" for one in g.members} == trained
    assert "lora: 14 parameters that 'muon' assigns to the rule 'muon' are frozen" in plan.notes
    run = traced_trainer(plan, backend)
    start = run.arrays()
    steps(run, plan, 0, 2)
    for name, array in run.arrays().items():
        if (key := name.removeprefix("model.")) in plan.parameters:
            assert (array.tobytes() != start[name].tobytes()) == (key in trained), name


def test_what_would_train_a_frozen_weight_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'role_lr' sets lr_mul of 'head\.weight', which 'lora'"):
        planned("lora,role_lr", model__tied=False, role_lr__head=2.0)


def test_a_model_of_another_plugin_is_tuned_with_that_frozen() -> None:
    """Its tables are frozen, so none of its parameters is expected to change."""
    plan = planned("lora,value_embeds")
    tables = {name for name, p in plan.parameters.items() if p.owner == "value_embeds"}
    assert tables
    assert tables <= plan.frozen
    (expected,) = (one.expected for one in plan.plugins if one.name == "value_embeds")
    assert expected
    assert not [key for key in expected if key.startswith("parameter:")]


def test_what_export_prints_can_be_typed(tmp_path: Path) -> None:
    typed = HUGGING_FACE.loading('my "new" model')
    assert typed["transformers"] == r'AutoModelForCausalLM.from_pretrained("my \"new\" model")'
    assert typed["vLLM"] == "vllm serve 'my \"new\" model'"
    assert typed["mlx-lm"].startswith("mlx_lm.generate --model 'my \"new\" model'")
    assert list(HUGGING_FACE.loading(str(tmp_path))) == ["transformers"]  # no tokenizer
    (tmp_path / "tokenizer.json").write_text("{}")
    assert HUGGING_FACE.loading(str(tmp_path)).keys() == typed.keys()
    assert PEFT_ADAPTER.loading('a"b') == {"PEFT": r'PeftModel.from_pretrained(model, "a\"b")'}


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_trained_whole_moves_and_is_exported(tmp_path: Path, tied: bool) -> None:
    whole = ["embedding", "norms"] + ["head"] * (not tied)
    plan = planned(lora__train=whole, model__tied=tied)
    trained = {p.role for name, p in plan.parameters.items() if name not in plan.frozen}
    assert trained == {"lora.a", "lora.b", "embedding.token", "norm", *["head"] * (not tied)}
    run = Run.open(leave_run(tmp_path / "run", lora__train=whole, model__tied=tied))
    with pytest.raises(PlanError, match="the layout peft is of adapters alone"):
        run.export(tmp_path / "adapter", layout="peft")
    run.export(tmp_path / "model")
    plain = Run.open(tmp_path / "model", device="cpu")
    expected = logits(run._reader(exact=True))
    np.testing.assert_allclose(logits(plain._reader(exact=True)), expected, atol=1e-5, rtol=0)


def test_a_head_that_is_the_embedding_cannot_be_trained_apart() -> None:
    with pytest.raises(PlanError, match="names head, but the model has no such parameters"):
        planned(lora__train=["head"], model__tied=True)
