"""Tests of precedence, origins, and every refusal of a setting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.config.load import Loaded, load
from minillm_core.config.load import given as given_by
from minillm_core.config.origins import FLAGS
from minillm_core.config.presets import plugins_of
from minillm_core.config.schema import SECTIONS, TOP
from minillm_core.config.selection import FileSpec
from minillm_core.errors import ConfigError
from minillm_core.train.settings import layer_of, settings

Load = Callable[..., Loaded]
Write = Callable[[str | bytes], Path]


def read(loaded: Loaded, key: str) -> object:
    value: object = loaded.config
    for part in key.split("."):
        value = getattr(value, part)
    return value


# ---------------------------------------------------------------- precedence and origins


@given(
    in_file=st.none() | st.integers(1, 9),
    assigned=st.none() | st.integers(1, 9),
    flag=st.none() | st.integers(1, 9),
    key=st.sampled_from(["train.steps", "seed"]),
)
def test_the_highest_layer_wins_and_is_the_origin(
    loaded: Load, settings_file: Write, in_file, assigned, flag, key
) -> None:
    table, _, name = key.rpartition(".")
    head = f"[{table}]\n" if table else ""
    path = settings_file(f"{head}{name} = {in_file}" if in_file else "")
    flag_name = next(flag_name for flag_name, target in FLAGS.items() if target == key)
    result = loaded(
        *([f"{key}={assigned}"] if assigned else []), file=path, flags={flag_name: flag}
    )
    layers = [(flag, flag_name), (assigned, "command line"), (in_file, str(path))]
    lowest = (360, "preset tiny") if key == "train.steps" else (0, "default")
    value, origin = next((layer for layer in layers if layer[0]), lowest)
    assert (read(result, key), result.origins[key]) == (value, origin)


def test_every_setting_has_an_origin(loaded: Load) -> None:
    origins = loaded("muon.lr=0.1", plugins="muon,other").origins
    inside = {f"{name}.{key}" for name, model in SECTIONS.items() for key in model.model_fields}
    assert set(origins) == {*TOP, *inside, "plugins.muon", "plugins.other", "muon.lr"}
    assert origins["model.dim"] == "preset tiny"
    assert origins["data.seed"] == "default"
    assert origins["plugins.muon"] == "--plugins"
    assert origins["muon.lr"] == "command line"


def test_a_settings_file_serves_as_a_preset_below_all_others(tmp_path: Path) -> None:
    best, file = tmp_path / "best.toml", tmp_path / "mine.toml"
    best.write_text(
        'preset = "small"\n[train]\nsteps = 7\nlr = 0.5\nclip = 2.0\n[plugins.muon]\nlr = 0.1\n'
    )
    file.write_text("[train]\nlr = 0.25\n")
    default = {"default_preset": lambda: ("tiny", "a CPU")}
    result = load(preset=str(best), file=file, assignments=["train.clip=3"], **default)
    assert (result.preset, result.model.layers) == ("small", 8)  # the shape of the named preset
    assert (result.train.steps, result.train.minutes) == (7, None)
    assert (result.train.lr, result.train.clip) == (0.25, 3.0)
    assert result.plugins == {"muon": {"lr": 0.1}}
    assert result.origins["train.steps"] == str(best)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(preset="./none.toml", **default)


@pytest.mark.parametrize(
    ("arguments", "preset", "origin"),
    [
        ({}, "tiny", "device"),
        ({"preset": "small"}, "small", "--preset"),
        ({"assignments": ["preset=small"]}, "small", "command line"),
        ({"assignments": ["preset=small"], "preset": "350m"}, "350m", "--preset"),
    ],
)
def test_the_preset_is_asked_for_or_the_machine_s(arguments, preset, origin) -> None:
    result = load(default_preset=lambda: ("tiny", "a CPU"), **arguments)
    assert result.config.preset == preset
    assert result.origins["preset"] == origin
    assert ("no --preset given; using tiny, the default for a CPU" in result.notes) == (
        origin == "device"
    )


def test_a_file_may_name_its_preset_and_its_plugins(loaded: Load, settings_file: Write) -> None:
    path = settings_file('preset = "small"\nseed = 3\n[plugins.muon]\n[plugins.gate]\nwidth = 8\n')
    result = loaded(file=path)
    assert result.config.preset == "small"
    assert result.config.seed == 3
    assert result.config.plugins == {"gate": {"width": 8}, "muon": {}}
    assert result.origins["plugins.muon"] == result.origins["gate.width"] == str(path)
    assert result.specs == {"gate": "gate", "muon": "muon"}


def test_options_of_plugins_follow_the_same_precedence(loaded: Load, settings_file: Write) -> None:
    path = settings_file("muon.lr = 0.1\n[plugins.muon]\nmomentum = 0.9\n")
    result = loaded("muon.lr=0.2", file=path)
    assert result.config.plugins == {"muon": {"lr": 0.2, "momentum": 0.9}}


@given(st.permutations(["muon", "gate", "./x/trick.py:Trick"]))
def test_the_order_of_plugins_never_matters(loaded: Load, order) -> None:
    result = loaded(plugins=",".join(order))
    assert list(result.specs.items()) == [
        ("gate", "gate"),
        ("muon", "muon"),
        ("trick", FileSpec("./x/trick.py", "Trick")),
    ]
    assert list(result.config.plugins) == ["gate", "muon", "trick"]


def test_a_plugin_of_the_file_can_be_taken_away(loaded: Load, settings_file: Write) -> None:
    path = settings_file("[plugins.muon]\nlr = 0.1\n[plugins.gate]\n")
    result = loaded(file=path, plugins="-muon,other")
    assert list(result.config.plugins) == ["gate", "other"]
    assert not any("muon" in key for key in result.origins)


def test_a_file_takes_plugins_away_from_its_preset_and_the_command_line_adds_them_again(
    loaded: Load, settings_file: Write
) -> None:
    path = settings_file("[plugins]\nbackout = false\nmuon = false\n[plugins.gate]\n")
    result = loaded(preset=RECIPE, file=path)
    assert set(result.config.plugins) == {*plugins_of(RECIPE), "gate"} - {"backout", "muon"}
    assert not any(key == "plugins.muon" or key.startswith("muon.") for key in result.origins)
    again = loaded(preset=RECIPE, file=path, plugins="muon").config.plugins
    assert set(again) == {*plugins_of(RECIPE), "gate"} - {"backout"}
    with pytest.raises(ConfigError, match="backout is not a table"):
        loaded(file=settings_file("[plugins]\nbackout = true\n"))


RECIPE = "speedrun"


@given(gone=st.sets(st.sampled_from(sorted(plugins_of(RECIPE)))), more=st.booleans())
def test_a_plugin_of_a_preset_goes_with_its_options(loaded: Load, gone: set, more: bool) -> None:
    items = [f"-{name}" for name in sorted(gone)] + ["other"] * more
    result = loaded(preset=RECIPE, plugins=",".join(items))
    left = {name: table for name, table in plugins_of(RECIPE).items() if name not in gone}
    assert result.config.plugins == dict(
        sorted({**left, **({"other": {}} if more else {})}.items())
    )
    assert not any(key.removeprefix("plugins.").split(".")[0] in gone for key in result.origins)


def test_a_file_changes_what_its_preset_gives_a_plugin(loaded: Load, settings_file: Write) -> None:
    other = next(name for name in plugins_of(RECIPE) if name != "muon")
    path = settings_file(f'preset = "{RECIPE}"\nmuon.lr = 0.5\n[plugins.{other}]\nb = 1\n')
    result = loaded("muon.lr=0.6", file=path)
    assert result.config.plugins["muon"] == {**plugins_of(RECIPE)["muon"], "lr": 0.6}
    assert result.config.plugins[other] == {**plugins_of(RECIPE)[other], "b": 1}
    assert (result.origins["muon.lr"], result.origins[f"{other}.b"]) == ("command line", str(path))
    assert loaded(file=path).origins["muon.lr"] == str(path)
    without = loaded(file=path, plugins=f"-muon,-{other}")
    assert not {"muon", other} & set(without.config.plugins)


def test_an_option_of_what_is_taken_away_is_refused_where_it_is_typed(loaded: Load) -> None:
    with pytest.raises(
        ConfigError, match=r"'muon' is removed, but its option muon\.lr is"
    ) as caught:
        loaded("muon.lr=1", preset=RECIPE, plugins="-muon")
    assert caught.value.where == "command line: muon.lr=1"
    assert caught.value.fix == "leave out muon.lr, or -muon in --plugins"


def test_the_command_of_a_run_can_be_repeated_when_it_goes_on(
    loaded: Load, settings_file: Write
) -> None:
    told = {"file": settings_file("[muon]\nlr = 0.5\n"), "plugins": "-muon", "preset": RECIPE}
    first = loaded(**told)
    again = loaded(**told, recorded=layer_of(settings(first), where="run.json"))
    assert again.config == first.config
    assert again.specs == first.specs


@given(st.sampled_from(["train.steps", "train.minutes"]), st.booleans())
def test_a_later_budget_clears_the_earlier_one(loaded: Load, key: str, by_clock: bool) -> None:
    preset, held = ("small", "train.minutes") if by_clock else ("tiny", "train.steps")
    other = {"train.steps": "train.minutes", "train.minutes": "train.steps"}[key]
    result = loaded(f"{key}=7", preset=preset)
    assert read(result, key) == 7
    assert read(result, other) is None
    cleared = "cleared by command line" if held == other else "default"
    assert result.origins[other] == cleared
    assert len(result.notes) == (held == other)


def test_steps_on_a_preset_by_the_clock(loaded: Load) -> None:
    result = loaded(preset="small", flags={"--steps": 20})
    assert result.origins["train.minutes"] == "cleared by --steps"
    assert result.notes == ("train.steps (--steps) replaces train.minutes (preset small)",)


@pytest.mark.parametrize("key", ["eval.every", "eval.samples", "model.head_dim", "data.tokenizer"])
def test_none_resets_a_setting_to_its_default(loaded: Load, settings_file: Write, key: str) -> None:
    table, _, name = key.partition(".")
    value = '"a.json"' if table == "data" else "8"
    file = settings_file(f"[{table}]\n{name} = {value}")
    assert read(loaded(file=file, preset="tiny"), key) is not None
    assert read(loaded(f"{key}=none", file=file, preset="tiny"), key) is None


def test_a_file_with_a_byte_order_mark_is_read(loaded: Load, settings_file: Write) -> None:
    file = settings_file("seed = 3\n".encode("utf-8-sig"))
    assert loaded(file=file, preset="tiny").config.seed == 3


def test_none_is_no_value_of_a_setting_without_that_default(loaded: Load) -> None:
    with pytest.raises(ConfigError, match=r'eval\.tokens must be a whole number .* not "none"'):
        loaded("eval.tokens=none", preset="tiny")


@pytest.mark.parametrize(
    ("idle", "other"), [("context_exchange=heads", "context"), ("schedule=gpipe", "pipeline")]
)
def test_how_to_divide_what_is_not_divided_is_noted(loaded: Load, idle: str, other: str) -> None:
    note = f"mesh.{idle} has no effect without mesh.{other}=2, or more"
    assert loaded(f"mesh.{idle}", preset="tiny").notes == (note,)
    assert loaded(f"mesh.{idle}", f"mesh.{other}=2", preset="tiny").notes == ()


def test_what_the_layers_above_the_preset_say(settings_file: Write) -> None:
    path = settings_file('device = "cpu"')
    assert given_by("device", file=path, assignments=(), flags={}) == "cpu"
    assert given_by("device", file=path, assignments=(), flags={"--device": "mps"}) == "mps"
    assert given_by("backend", file=path, assignments=(), flags={"--backend": None}) is None


def test_one_path_may_stand_for_several(loaded: Load) -> None:
    assert loaded("data.paths=a.txt").config.data.paths == ("a.txt",)
    assert loaded('data.paths=["a","b"]').config.data.paths == ("a", "b")
    assert loaded(flags={"--data": ["a"]}).config.data.paths == ("a",)


def test_a_table_may_be_given_at_once(loaded: Load) -> None:
    assert loaded("model={dim = 64, layers = 2}").config.model.dim == 64


def test_a_file_may_give_the_text_of_a_setting(loaded: Load, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("{% two\nlines")
    options = loaded(f"notes.text=@{tmp_path}/long.txt", plugins="notes").config.plugins["notes"]
    assert options == {"text": "{% two\nlines"}
    assert loaded('notes.text="@here"', plugins="notes").config.plugins["notes"]["text"] == "@here"


@pytest.mark.parametrize(("content", "reason"), [(b"\xff", "not UTF-8"), (bytes(5 << 20), "4 MiB")])
def test_a_file_that_is_no_text_gives_nothing(
    loaded: Load, tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        loaded(f"preset=@{tmp_path}/a")
    with pytest.raises(ConfigError, match="No such file"):
        loaded(f"preset=@{tmp_path}/b")


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("argument", "what", "fix"),
    [
        ("model.dmi=1", "there is no setting 'model.dmi'", "did you mean model.dim?"),
        ("train.learning_rate=1", "'train.learning_rate'", "did you mean train.lr?"),
        ("learning_rate=1", "there is no setting 'learning_rate'", "did you mean train.lr?"),
        ("model.n_embd=1", "there is no setting 'model.n_embd'", "did you mean model.dim?"),
        ("batch_size=8", "there is no setting 'batch_size'", "did you mean train.rows?"),
        ("batch=8", "there is no setting 'batch'", "did you mean train.rows?"),
        ("depth=8", "there is no setting 'depth'", "did you mean model.layers?"),
        ("dim=1", "there is no setting 'dim'", "model.dim"),
        ("every=1", "there is no setting 'every'", "eval.every or checkpoint.every or log.every"),
        ("xyzzy=1", "there is no setting 'xyzzy'", "tables: model, train"),
        ("model.xyzzy=1", "there is no setting 'model.xyzzy'", "model has: layers"),
        (
            "train.save_steps=1",
            "no setting 'train.save_steps'",
            "checkpoint.every; train has: steps, ",
        ),
        ("save_steps=1", "there is no setting 'save_steps'", "checkpoint.every; tables: model"),
        (
            "run.nonsense=1",
            "'run' is neither",
            "the tables are model, train, data, eval, checkpoint",
        ),
        ("train.layers=1", "there is no setting 'train.layers'", "model.layers"),
        ("modle.dim=1", "'modle' is neither a table", "model.dim; or, if 'modle' is a plugin"),
        ("muon.lr=1", "'muon' is neither a table", "add --plugins muon"),
        ("model=3", "'model' is a table of settings", "model.layers"),
        ("plugins.muon.lr=1", "plugins are named by --plugins", "NAME.option=value"),
        ("foo", "'foo' is not of the form key=value", "train.lr=0.01"),
        ("=3", "'=3' is not of the form key=value", "train.lr=0.01"),
        ("train..lr=3", "not of the form key=value", "train.lr=0.01"),
        ("train.lr=fast", 'train.lr must be a number of at least 0, not "fast"', "peak learning"),
        ("train.lr=inf", "train.lr must be a number of at least 0, not inf", ""),
        ("train.lr=nan", "train.lr must be a number of at least 0, not nan", ""),
        (f"train.steps={10**400}", "train.steps must be a whole number of at least 1", "64 bits"),
        (f"train.lr={10**400}", "train.lr must be a number of at least 0, not 100000", ""),
        ("train.minutes=1e308", "train.minutes must be a number above 0 and at most", "minutes of"),
        (f"data.seed={2**63}", "data.seed must be a whole number of at least 0", "64 bits"),
        ("train.lr=-1", "train.lr must be a number of at least 0, not -1", ""),
        ("train.rows=true", "train.rows must be a whole number of at least 1, not true", ""),
        ("train.rows=2.0", "train.rows must be a whole number of at least 1, not 2.0", ""),
        (
            "train.minutes=0",
            "train.minutes must be a number above 0 and at most 10000000, not 0",
            "",
        ),
        ("train.warmup=2", "train.warmup must be a number from 0 to 1, not 2", ""),
        ("train.dtype=f32", "train.dtype must be one of auto, float32, bfloat16, float16", ""),
        ("train.betas=[0.9]", "train.betas must be a list of 2 numbers, not [0.9]", ""),
        ("train.betas=[0.9,1]", "AdamW's decay rates are at least 0 and below 1", "[0.9,0.95]"),
        (
            "train.checkpointing=1",
            "train.checkpointing must be true or false or selective, not 1",
            "",
        ),
        ("data.paths=[1]", "data.paths must be a text or a list of texts, not [1]", ""),
        ("data.tokenizer=1", "data.tokenizer must be a text, not 1", "tokenizer.json"),
        ("data.val=true", "data.val must be a number or a text, not true", ""),
        ("data.val=1.5", "the held-out fraction lies between 0 and 1", "data.val=0.05"),
        ("data.val=0", "the held-out fraction lies between 0 and 1", "data.val=0.05"),
        ("backend=jax", "backend must be one of auto, torch, mlx", ""),
        ("seed=-1", "seed must be a whole number of at least 0, not -1", ""),
        ("preset=3", "preset must be a name, not 3", ""),
        ("preset=tinny", "there is no preset 'tinny'", "did you mean tiny?"),
        ("preset=xyzzy", "there is no preset 'xyzzy'", "gpt2-124m"),
        ("train.cooldown=0.4", "the schedule 'cosine' has no cooldown", "train.schedule=wsd"),
        ("kernels=a b", "'a b' is not a policy for kernels", "--kernels strict,attention=sdpa"),
        ("model.heads=3", "256 features cannot be split over 3 heads", "model.dim=258"),
        ("model.kv_heads=3", "4 query heads cannot share 3 key and value heads", "1, 2, 4"),
        ("model.dim=12", "a head 3 wide cannot be rotated", "model.dim=16"),
        ("model.head_dim=7", "a head 7 wide cannot be rotated", "model.head_dim=8"),
        ("data.end_of_text=</s>", "trained here has", "data.tokenizer=PATH"),
    ],
)
def test_an_argument_is_refused(loaded: Load, argument: str, what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(argument)
    assert what in caught.value.what
    assert fix in (caught.value.fix or "")
    assert "command line" in (caught.value.where or "")
    assert str(caught.value).count("\n") < 12


@pytest.mark.parametrize(
    ("plugins", "argument", "what"),
    [
        ("muon", "muon=3", "'muon' is a plugin: its options are muon.option"),
        ("muon", "muon.a.b=3", "muon.a.b has too many parts"),
        ("muon", "muon.lr=inf", "muon.lr must be a finite number, not inf"),
        ("muon", f"muon.lr={10**400}", "muon.lr must be a finite number, not 100000"),
        ("muon", "mun.lr=1", "'mun' is neither a table of settings nor a plugin of this run"),
    ],
)
def test_an_option_is_refused(loaded: Load, plugins: str, argument: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        loaded(argument, plugins=plugins)
    assert caught.value.where == f"command line: {argument}"


def test_very_many_heads_are_refused_at_once(loaded: Load) -> None:
    with pytest.raises(ConfigError, match="query heads cannot share 3 key") as caught:
        loaded(f"model.heads={2**60}", "model.kv_heads=3", "model.head_dim=2")
    assert "model.kv_heads must divide model.heads: 1, 2, 4, 8" in (caught.value.fix or "")


def test_prompts_of_no_samples_are_refused(loaded: Load) -> None:
    with pytest.raises(ConfigError, match="prompts are given, but no samples") as caught:
        loaded("eval.samples=0", "eval.prompts=The rain")
    assert "eval.samples = 0 (command line" in (caught.value.where or "")


def test_a_mistyped_plugin_is_corrected(loaded: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded("mun.lr=1", plugins="muon")
    assert caught.value.fix == "muon.lr; or, if 'mun' is a plugin, add --plugins mun"


@pytest.mark.parametrize(
    ("content", "what", "where"),
    [
        (
            "[train]\nlr = fast\n",
            "the settings file is not TOML: Invalid value",
            "line 2, column 6",
        ),
        ("[train\n", "the settings file is not TOML", "line 1, column 7"),
        (f"a = {'[' * 3000}{']' * 3000}\n", "the settings file is not TOML", "run.toml"),
        (f"seed = {'9' * 5000}\n", "the settings file is not TOML", "run.toml"),
        ("a = 1\na = 2\n", "the settings file is not TOML", "run.toml"),
        (b"[train]\n# \xff\n", "the settings file is not UTF-8 text", "line 2, byte 10"),
        ("[train]\nlr = 1\n\nrosw = 2\n", "there is no setting 'train.rosw'", "line 4"),
        ("[train]\nlr = 'x'\n", "train.lr must be a number", "line 2"),
        ("[model]\nheads = 3\n", "256 features cannot be split", "run.toml"),
        ("model = 3\n", "'model' is a table of settings", "line 1"),
        ("plugins = 3\n", "'plugins' holds a table for each plugin", "line 1"),
        ("[plugins]\nmuon = 3\n", "plugins.muon is not a table", "line 1"),
        ("[plugins.model]\n", "no plugin may be called 'model'", "line 1"),
        ('[plugins."a b"]\n', "'a b' cannot be a plugin's name", "line 1"),
        ("[muon]\n", "'muon' is neither a table of settings nor a plugin", "line 1"),
        ("\n[muon]\nlr = 1\n", "'muon' is neither a table of settings nor a plugin", "line 3"),
        ("muon.lr=1\n[plugins.muon]\nlr=2\n", "muon.lr is given twice", "line"),
        ("[train]\nsteps = 1\nminutes = 1\n", "train.steps and train.minutes are both", "line 3"),
    ],
)
def test_a_file_is_refused_with_its_line(
    loaded: Load, settings_file: Write, content, what: str, where: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(file=settings_file(content))
    assert what in caught.value.what
    assert where in (caught.value.where or "")


@pytest.mark.parametrize("name", ["absent.toml", "."])
def test_a_file_that_cannot_be_read_is_refused(loaded: Load, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="the settings file cannot be read: "):
        loaded(file=tmp_path / name)


def test_of_one_key_given_twice_the_last_holds_and_a_note_says_so(loaded: Load) -> None:
    found = loaded("model.dim=128", "train.lr=0.1", "model={dim=512}")
    assert found.config.model.dim == 512
    assert [note for note in found.notes if "twice" in note] == [
        "model.dim is given twice; the last one holds (command line: model={dim=512})"
    ]


def test_a_flag_beside_its_key_holds_and_a_note_says_so(loaded: Load) -> None:
    found = loaded("model.layers=10", flags={"--depth": 8}, preset="depth")
    assert found.config.model.layers == 8
    assert "model.layers is given twice; --depth 8 holds" in found.notes


def test_both_budgets_at_once_are_refused(loaded: Load) -> None:
    with pytest.raises(ConfigError, match="are both given"):
        loaded("train.steps=1", "train.minutes=1")


def test_a_wrong_flag_is_named(loaded: Load) -> None:
    with pytest.raises(ConfigError, match=r"train\.steps must be a whole number") as caught:
        loaded(flags={"--steps": 0})
    assert caught.value.where == "--steps 0"


@pytest.mark.parametrize(
    ("plugins", "what"),
    [
        ("a,,b", "a plugin's name is empty"),
        ("a,a", "plugin 'a' is named twice"),
        ("./x/a.py:A,a", "plugin 'a' is named twice"),
        ("./x/a.py", "does not say which class"),
        ("./x/a b.py:A", "'a b' cannot be a plugin's name"),
        ("./x/my-trick.py:A", "'my-trick' cannot be a plugin's name"),
        ("./x/model.py:A", "no plugin may be called 'model'"),
        ("paired-heads", "'paired-heads' cannot be a plugin's name"),
        ("a,-a", "plugin 'a' is both added and taken away"),
        ("-a", "plugin 'a' cannot be taken away"),
        *((name, f"no plugin may be called '{name}'") for name in (*SECTIONS, "plugins")),
    ],
)
def test_a_set_of_plugins_is_refused(loaded: Load, plugins: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        loaded(plugins=plugins)
    assert caught.value.where == f"--plugins {plugins}"


def test_two_classes_of_one_file_need_a_file_each(loaded: Load) -> None:
    with pytest.raises(ConfigError, match=r"named twice: ./x/a.py:A and ./x/a.py:B") as caught:
        loaded(plugins="./x/a.py:A,./x/a.py:B")
    assert "give each class a file of another name" in str(caught.value.fix)


def test_a_file_whose_name_is_none_of_a_plugin_is_to_be_renamed(loaded: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(plugins="./x/my-trick.py:A")
    assert caught.value.fix == "rename the file: x/my_trick.py"


def test_an_empty_set_of_plugins_is_none(loaded: Load) -> None:
    assert loaded(plugins="").specs == {}
