"""Modeling files of models that no program implements: without minillm they compute the same."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm_core import Module, Plan, PlanError, Plugin, Refusal, build_plan
from minillm_core.backends.base import lone_row
from minillm_core.checkpoint.directories import export_checked, exporting
from minillm_core.config.load import load
from minillm_core.directories import TrainedModel
from minillm_core.inspection import batch_hook, installed_plugins
from minillm_core.inspection import trainer as create_trainer
from minillm_core.ops.arrays import ARRAY_FUNCTIONS
from minillm_core.plan.render import exportable
from minillm_core.plugins.manager import find
from minillm_core.plugins.manager import load as load_plugins
from minillm_core.plugins.plugin import Plugin as AnyPlugin
from minillm_hf import read_model_directory
from minillm_hf.own import copying, known, writing
from minillm_hf.own.copying import CannotWriteError, Source
from minillm_hf.own.directory import OWN_DIRECTORY, modeling_files
from minillm_modded.smear import Smear
from tools.every_plugin import ALONE, APART, OPTIONS, READING, Form, forms

pytest.importorskip("torch")

ELSEWHERE = Path(__file__).with_name("own_elsewhere.py")
TIGHT = 1e-4
"""Tolerance of logits, in float32."""
SHAPING = {"build_attention", "build_model", "compute_loss"}
SMALL = {
    **{"model.layers": 3, "model.dim": 32, "model.heads": 4, "model.kv_heads": 2},
    **{"model.hidden": 48, "model.vocab": 97, "train.seq_len": 48, "train.rows": 4},
}


def plan_of(plugins: Any = None, values: Mapping[str, Any] = {}, preset: str = "tiny") -> Plan:
    loaded = load(
        preset=preset,
        plugins=plugins,
        assignments=[
            f"{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in {**SMALL, **values}.items()
        ],
        default_preset=lambda: ("tiny", "test"),
    )
    return build_plan(loaded.config, load_plugins(loaded.specs, loaded.config.plugins))


def shapes_models(form: Form) -> bool:
    return bool(SHAPING & set(form.cls.hooks)) and form.name not in READING


def speedrun(layers: int = 6, **values: Any) -> Plan:
    """Plan the recipe speedrun with all of its plugins, with sliding windows shorter than a short row."""
    shorter = {"windows.start": 8, "windows.window": 32, "windows.block": 8}
    return plan_of(None, {"model.layers": layers, **shorter, **values}, "speedrun")


def everything() -> Plan:
    names = [
        entry.name
        for entry in installed_plugins()
        if shapes_models(form := Form(entry.name)) and not form.left_out and form.name not in ALONE
    ]
    settings = {**Form("windows", OPTIONS["windows"][0]).settings, **APART}
    apart = {key: value for key, value in settings.items() if key.partition(".")[0] in names}
    return plan_of(",".join(names), apart)


@dataclass
class Trained:
    """A model far from its initial values, with its logits of a row."""

    plan: Plan
    arrays: dict[str, np.ndarray] = field(init=False)
    ids: np.ndarray = field(init=False)
    logits: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan.with_train(dtype="float32", compile="off")
        model = create_trainer(plan, "torch")
        random, full = np.random.default_rng(0), model.arrays()
        self.arrays = {
            name: (array + 0.1 * random.standard_normal(array.shape)).astype(np.float32)
            for name, array in full.items()
            if name.startswith(("model.", "state."))
        }
        model.load({**full, **self.arrays})
        self.ids = random.integers(0, plan.config.model.vocab, 16).astype(np.int32)
        row, hook = lone_row(self.ids), batch_hook(plan)
        if hook is not None:
            row = hook(dict(row), "decode")
        self.logits = np.stack(
            [
                model.next_logits({name: array[:, : t + 1] for name, array in row.items()})
                for t in range(len(self.ids))
            ]
        )

    def export(self, folder: Path, **options: Any) -> Path:
        model = TrainedModel(self.plan, self.arrays, None)
        OWN_DIRECTORY.write(folder, model, lambda line: None, **options)
        np.savez(folder / "expected.npz", ids=self.ids, logits=self.logits)
        return folder


def elsewhere(program: str, folders: Iterable[Path], tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Load directories in a process that cannot import minillm: folder's name -> facts."""
    pytest.importorskip("mlx_lm" if program == "mlx" else program)
    environment = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        [sys.executable, str(ELSEWHERE), program, *map(str, folders)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {Path(name).name: facts for name, facts in found.items()}


def assert_the_same(facts: dict[str, Any], within: float = TIGHT) -> None:
    assert "error" not in facts, facts
    assert facts["largest"] > 1
    assert facts["apart"] <= within
    assert facts["cached"] == facts["full"]
    assert len({one for row in facts["full"] for one in row}) > 2  # not one repeated token


# every plugin


def _cases() -> dict[str, Callable[[], Plan]]:
    cases: dict[str, Callable[[], Plan]] = {"plain": plan_of, "tied": lambda: plan_of(None, TIED)}
    for form in filter(shapes_models, forms()):
        name = re.sub(r"\W+", "_", str(form)).strip("_")
        cases[name] = lambda form=form: plan_of(",".join(form.names), form.settings)
    slots = f"{Path(__file__).with_name('every_slot.py')}:Slots"
    cases["every_slot"] = lambda: plan_of(slots)
    narrow = {"windows.start": 8, "windows.window": 8, "windows.block": 8}
    apart = {"gated_delta.layers": "[1]", "mla.layers": "[2]", "windows.documents": True}
    apart |= {"model.layers": 4}
    cases["core_in_layout"] = lambda: plan_of("windows,attn_sink,paired_heads", narrow)
    cases["hybrid"] = lambda: plan_of("gated_delta,layer_loop,mla,mudd,windows", narrow | apart)
    return {**cases, "everything": everything, "speedrun": speedrun}


TIED = {"model.tied": True}
CASES = _cases()


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | Exception]:
    """Write each case's directory; the error of one is the failure of its own tests alone."""
    above, made = tmp_path_factory.mktemp("own"), dict[str, Path | Exception]()
    for name, plan in CASES.items():
        try:
            made[name] = Trained(plan()).export(above / name)
        except Exception as error:
            made[name] = error
    return made


@pytest.fixture(scope="module")
def folders(exports: dict[str, Path | Exception]) -> dict[str, Path]:
    return {name: made for name, made in exports.items() if isinstance(made, Path)}


@pytest.fixture(scope="module", params=["transformers", "mlx"])
def found(
    request: pytest.FixtureRequest,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, Any]]:
    return elsewhere(request.param, folders.values(), tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_each_plugin_s_model_is_the_same_without_minillm(
    case: str, exports: dict[str, Path | Exception], found: dict[str, dict[str, Any]]
) -> None:
    if isinstance(made := exports[case], Exception):
        raise made
    assert_the_same(found[case])


@pytest.mark.slow
def test_what_is_written_passes_a_linter(folders: dict[str, Path]) -> None:
    """Undefined names, unused imports and unused variables."""
    files = [str(path) for folder in folders.values() for path in folder.glob("modeling_*.py")]
    assert files
    assert len(files) == 2 * len(folders)
    linter = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E9,F", "-q", *files]
    done = subprocess.run(linter, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_cases_are_all_that_is_shipped() -> None:
    names = {entry.name for entry in installed_plugins()}
    shaping = {n for n in names if SHAPING & set(find(n).cls.hooks)} - set(READING)
    assert {form.name for form in filter(shapes_models, forms())} == shaping
    assert len(shaping) >= 22
    assert len(everything().plugins) >= 15
    assert {"value_embeds", "bigram_hash", "windows"} <= {p.name for p in speedrun().plugins}


# the files


def test_a_file_says_what_it_is_and_imports_nothing_of_minillm() -> None:
    for name, text in modeling_files(speedrun()).items():
        tree = ast.parse(text)
        doc = ast.get_docstring(tree) or ""
        assert "written by minillm" in doc
        assert "Licence of this file: MIT" in doc
        for technique in ("arXiv:2302.05442", "arXiv:2109.08668", "arXiv:2410.17897"):
            assert technique in doc
        imported = {
            one
            for node in ast.walk(tree)
            for one in (
                [node.module]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
        }
        assert not any(str(one).startswith("minillm") for one in imported)
        framework = "mlx" if name == writing.MLX else "torch"
        assert any(str(one).startswith(framework) for one in imported)
        assert not {"exec", "eval", "__import__"} & {
            node.id for node in ast.walk(tree) if isinstance(node, ast.Name)
        }


class Halved(Module):
    def forward(self, y):
        return y * 0.5


def test_the_licence_of_others_is_not_claimed(planned: Callable[..., Plan]) -> None:
    plan = planned(odd=plugin_with(lambda self, attn: attn.out.gate(Halved)), smear=Smear())
    for text in modeling_files(plan).values():
        assert "What is copied from odd (a file), smear (" in text
        assert "class Halved(Module)" in text
    assert "What is copied from" not in modeling_files(plan_of("smear"))[writing.MLX]


def test_only_what_is_used_is_written() -> None:
    plain = modeling_files(plan_of())[writing.TRANSFORMERS]
    assert "\n3 layers, 32 wide, 4 heads (2 of keys and values), 97 tokens; plan " in plain
    one = modeling_files(plan_of(None, {"model.layers": 1}))[writing.TRANSFORMERS]
    assert "\n1 layer, 32 wide" in one
    for absent in ("look_back", "Site", "Layout", "argsort", "documents = ops", "batch_fields"):
        assert absent not in plain
    assert plain.count("class Block") == 1
    assert "init=" not in plain
    assert "lr_mul" not in modeling_files(speedrun())[writing.TRANSFORMERS].partition('"""\n')[2]
    assert modeling_files(plan_of()) == modeling_files(plan_of())


def test_every_array_function_is_there_on_both() -> None:
    for name in ("parts_torch", "parts_mlx"):
        text = Path(copying.__file__).with_name(f"{name}.py").read_text()
        statement = Source(name, text).top["Ops"]
        assert isinstance(statement, ast.ClassDef)
        made = {one for member in statement.body for one in copying._bound(member)}
        wanted = {
            *(one for one in ARRAY_FUNCTIONS if one != "qr"),  # of stages: no model calls it
            "linear",
            "embedding",
            "rms_norm",
            "swiglu",
            "rotate",
            "attention",
        }
        assert made >= wanted


# what cannot be written


def plugin_with(hook: Callable[..., None], name: str = "build_attention") -> AnyPlugin:
    return type("Odd", (Plugin,), {name: hook, "__doc__": "Odd."}, api=1)()  # type: ignore[call-arg]


class CallsLoss(Module):
    def forward(self, y):
        return self.ops.gram(y)


class AsksFramework(Module):
    def forward(self, y):
        return y if self.framework else -y


class UsesCore(Module):
    def forward(self, y):
        return y * len(build_plan.__name__)


class UsesPackage(Module):
    def forward(self, y):
        return y * pytest.approx(1.0).expected


class Nested:
    class Inner(Module):
        def forward(self, y):
            return y


class ReadsLabels(Module):
    def forward(self, y, labels):
        return y


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (CallsLoss, "ops.gram"),
        (AsksFramework, "self.framework"),
        (UsesCore, "build_plan"),
        (UsesPackage, "the package pytest"),
        (ReadsLabels, "labels"),
        (Nested.Inner, "not at the top level"),
    ],
)
def test_what_cannot_be_written_is_refused_with_the_reason(
    planned: Callable[..., Plan], cls: type, why: str
) -> None:
    plan = planned(odd=plugin_with(lambda self, attn: attn.out.gate(cls)))
    with pytest.raises(PlanError, match=re.escape(why)) as found:
        OWN_DIRECTORY.check(plan)
    assert "odd" in str(found.value)
    checked = export_checked(plan)
    assert checked.export.layout is None
    assert exportable(checked).startswith("none: no modeling file can be written: ")
    with pytest.raises(PlanError, match=re.escape(why)):
        exporting(checked)


@dataclass(frozen=True)
class Newer:
    """A specification of a later version of the core."""

    name: str = ""
    terms: tuple[Any, ...] = ()
    core: Any = None


def test_a_slot_that_is_not_known_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "KNOWN", {**known.KNOWN, "Newer": frozenset(("name", "terms"))})
    known.check_known(Newer())
    with pytest.raises(CannotWriteError, match=r"Newer\.core is filled"):
        known.check_known(Newer(core=3))


def test_the_known_fields_are_those_of_a_plan() -> None:
    spec = speedrun().spec
    block, attention = spec.blocks[0], spec.blocks[0].core_attention
    assert attention is not None
    assert block.site_in is not None
    for one in (spec, block, attention, attention.rope, spec.loss, spec.loss.form, block.site_in):
        assert known.KNOWN[type(one).__name__] <= set(vars(one))
    assert known.attributes() >= known.KNOWN_ATTRIBUTES


def test_an_attribute_that_is_not_known_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "KNOWN_ATTRIBUTES", writing.KNOWN_ATTRIBUTES - {"lookback"})
    with pytest.raises(PlanError, match=r"smear:SmearAcross sets lookback, which the writer"):
        OWN_DIRECTORY.check(plan_of("smear"))
    OWN_DIRECTORY.check(plan_of("xsa"))


# the plan's messages


@pytest.mark.parametrize(
    ("plugins", "said"),
    [
        (None, "a llama directory"),
        ("qk_norm", "a qwen3 directory"),
        ("smear", "a directory with its own modeling files: smear has no equivalent elsewhere"),
        ("smear,xsa", "a directory with its own modeling files: smear and xsa have no equ"),
    ],
)
def test_a_plan_says_which_export_a_run_will_have(plugins: str | None, said: str) -> None:
    assert exportable(export_checked(plan_of(plugins))).startswith(said)


# the directory


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Path]:
    trained = Trained(plan_of("smear,bigram_hash,moe", {"moe.layers": "[1]"}))
    return trained, trained.export(tmp_path_factory.mktemp("gated") / "model")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["transformers", "mlx"])
def test_shards_a_move_and_bfloat16(
    gated: tuple[Trained, Path], tmp_path: Path, program: str
) -> None:
    trained, written = gated
    sharded = trained.export(tmp_path / "before", shard_bytes=20_000)
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    moved = Path(shutil.move(sharded, tmp_path / "a b-ö.1"))
    half = trained.export(tmp_path / "half", dtype="bfloat16")
    found = elsewhere(program, [written, moved, half], tmp_path)
    assert_the_same(found[written.name])
    assert_the_same(found[moved.name])
    assert_the_same(found["half"], within=0.1)  # weights of 8 bits
    assert found["half"]["apart"] > TIGHT


def hand(folder: Path, to: Path, **values: Any) -> Path:
    """Copy a directory with an edited config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **values}))
    return to


@pytest.mark.slow
@pytest.mark.parametrize("program", ["transformers", "mlx"])
def test_an_edited_config_changes_the_longest_row_or_is_refused(
    gated: tuple[Trained, Path], tmp_path: Path, program: str
) -> None:
    _, written = gated
    code = "__import__('os').system('touch " + str(tmp_path / "ran") + "')"
    edits: dict[str, dict[str, Any]] = {
        "wider": {"hidden_size": 64},
        "code": {"hidden_size": code},
        "text": {"max_position_embeddings": code},
        "negative": {"max_position_embeddings": -1},
        "truth": {"max_position_embeddings": True},
        "shorter": {"max_position_embeddings": 20},
        "same": {"hidden_size": 32, "note": "of mine"},
    }
    copies = {name: hand(written, tmp_path / name, **given) for name, given in edits.items()}
    found = elsewhere(program, copies.values(), tmp_path)
    for name in ("wider", "code", "text", "negative", "truth"):
        assert "error" in found[name], name
    assert "hidden_size=64" in found["wider"]["error"]
    assert "tokens, but the model has 20 positions" in found["shorter"]["error"]
    assert_the_same(found["same"])
    assert not (tmp_path / "ran").exists()


TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.arange(1, 11)[None]

def refusal(call):
    try:
        call()
    except (ValueError, NotImplementedError) as error:
        return str(error)

mask = torch.ones_like(ids)
padded, held = mask.clone(), mask.clone()
padded[:, :2] = 0
held[:, -2:] = 0
print(refusal(lambda: model(ids, attention_mask=padded)))
print(refusal(lambda: model.generate(ids, attention_mask=held, max_new_tokens=2)))
static = dict(attention_mask=mask, max_new_tokens=2, cache_implementation="static")
print(refusal(lambda: model.generate(ids, **static)))
whole = model(ids, attention_mask=mask).logits
print(float((model(ids, attention_mask=held).logits - whole)[:, :8].abs().max()))
print(float((model(ids, logits_to_keep=1).logits[:, 0] - whole[:, -1]).abs().max()))
beams = model.generate(ids, attention_mask=mask, max_new_tokens=8, num_beams=3, do_sample=False)
again = model.generate(ids, attention_mask=mask, max_new_tokens=8, num_beams=3, do_sample=False, use_cache=False)
print(bool((beams == again).all()))
loss = model(ids, labels=ids).loss
loss.backward()
print(all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters()))
model.save_pretrained(sys.argv[2])
other = AutoModelForCausalLM.from_pretrained(sys.argv[2], trust_remote_code=True)
print(float((other(ids).logits - whole).abs().max()))
"""


@pytest.mark.slow
def test_transformers_pads_searches_trains_and_saves(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = Trained(plan_of("smear,bigram_hash,paired_heads")).export(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", TRANSFORMERS, str(folder), str(tmp_path / "again")],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    before, inside, static, held, kept, beams, trained, saved = done.stdout.splitlines()[-8:]
    assert "pad on the right" in before
    assert "prompts of one length" in inside
    assert "leave cache_implementation out" in static
    assert max(float(held), float(kept), float(saved)) < 1e-5
    assert beams == trained == "True"


def test_it_is_written_and_not_read(gated: tuple[Trained, Path]) -> None:
    _, written = gated
    assert not OWN_DIRECTORY.recognises(written)
    with pytest.raises(Refusal, match="not read here"):
        OWN_DIRECTORY.read(written)
    with pytest.raises(Refusal, match="written by export, and not read"):
        read_model_directory(written)
    with pytest.raises(Refusal, match="written in float16"):
        gated[0].export(written.with_name("other"), dtype="float16")
    config = json.loads((written / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"].startswith("modeling_minillm.")
    assert config["model_file"] == "modeling_mlx.py"
    card = (written / "README.md").read_text()
    assert "trust_remote_code=True" in card
    assert "AutoTokenizer" not in card
    assert "trust_remote_code" in OWN_DIRECTORY.loading("x")["transformers"]
    assert "mlx-lm" in OWN_DIRECTORY.loading("x")
    assert list(OWN_DIRECTORY.loading(str(written))) == ["transformers"]  # no tokenizer
