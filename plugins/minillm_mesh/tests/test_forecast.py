"""``minillm plan --gpus N``: the plan's estimate, sharded; checked by hand, as JSON, at 80 columns, refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

import minillm_core as minillm
from minillm_mesh.automatic import forecast
from minillm_mesh.cost import CARDS, seconds
from minillm_mesh.forecast import Forecast, owned

NUMBERS = 123_587_328  # parameters of gpt2-124m


def planned(plugins: str = "muon", **settings: object) -> minillm.Plan:
    given = {key.replace("_", ".", 1): value for key, value in settings.items()}
    return minillm.build_plan(minillm.load(preset="gpt2-124m", plugins=plugins, settings=given))


@pytest.fixture(scope="module")
def eight() -> Forecast:
    """Preset gpt2-124m with muon on eight H200."""
    return forecast(planned(), 8, None, "bfloat16")


def test_bytes_of_a_card_by_hand(eight: Forecast) -> None:
    one, other = eight.layouts["sharded"], eight.layouts["replicated"]
    whole = planned().estimate("bfloat16")
    assert other.memory["master weights"] == 4 * NUMBERS == whole.memory["master weights"]
    assert one.memory["weights"] == 2 * NUMBERS
    assert one.memory["gradients"] == 6 * NUMBERS  # of a micro-batch, and their sums
    share = one.memory["master weights"] / (4 * NUMBERS)
    assert 1 / 8 <= share <= 1.01 / 8
    states = sum(size for name, size in one.memory.items() if name.startswith("optimizer"))
    assert states <= 1.1 / 8 * sum(rule.state_bytes for rule in whole.rules)
    assert one.memory["activations"] == whole.memory["activations"]  # whole micro-batches


def test_what_is_sent_by_hand(eight: Forecast) -> None:
    reduce, gather = eight.data()["exchanges"]
    kinds = (reduce["collective"], gather["collective"])
    assert kinds == ("reduce-scatter", "all-gather")
    assert reduce["sent_bytes"] == 4 * NUMBERS * 7 / 8
    assert gather["sent_bytes"] == pytest.approx(2 * NUMBERS * 7 / 8)
    (all_reduce,) = eight.data()["otherwise"]["exchanges"]
    assert all_reduce["sent_bytes"] == 2 * 4 * NUMBERS * 7 / 8
    card = CARDS["h200"]
    assert all_reduce["seconds"] == seconds("all-reduce", 4 * NUMBERS, 8, card)


def test_work_by_hand(eight: Forecast) -> None:
    data, plan = eight.data(), planned()
    assert data["tokens"] * 8 == plan.tokens_per_step == 524_288
    assert data["flops"] == plan.estimate().flops_per_token * 65_536
    assert data["seconds"]["computing"] == pytest.approx(data["flops"] / (0.45 * 989.4e12))
    assert 0 < data["communication_share"] < 0.05 < 0.9 < data["of_linear"] < 1
    # five iterations of 4 m m n + 2 m m m; of 12 layers 4 square matrices and 3 of 768 x 2,048
    square, oblong = 6 * 768**3, 4 * 768**2 * 2048 + 2 * 768**3
    assert owned(plan, 1).flops == 5 * 12 * (4 * square + 3 * oblong)
    assert owned(plan, 8).flops < 1.4 / 8 * owned(plan, 1).flops


def test_rows_are_divided_where_micro_batches_cannot_be() -> None:
    found = forecast(planned(train_accumulate=1), 4, "h100", "bfloat16")
    data = found.data()
    assert (data["rows"], data["micro_batches"]) == (8, 1)
    alone = planned(train_accumulate=1).estimate("bfloat16").memory["activations"]
    assert data["memory"]["activations"] == round(alone / 4)


def test_more_cards_hold_less_and_send_no_less() -> None:
    plan = planned(train_accumulate=64)
    each = [forecast(plan, n, None, "bfloat16") for n in (1, 2, 4, 8, 16, 64)]
    assert [one.chosen.bytes for one in each] == sorted(
        (one.chosen.bytes for one in each), reverse=True
    )
    linear = [one.scaling_efficiency for one in each]
    assert linear[0] == pytest.approx(1.0)
    assert linear == sorted(linear, reverse=True)
    assert each[0].chosen.times.share == 0.0


def test_cards_that_share_layers_add_up_each_of_them() -> None:
    plan = planned(mesh_tensor=2)
    data, plain = forecast(plan, 8, None, "bfloat16").data(), forecast(plan, 2, None, "bfloat16")
    assert data["tokens"] == 131_072  # of four parts of a step, each computed by two cards
    assert data["flops"] == plan.estimate().flops_per_token * 65_536
    (sums,) = [one for one in data["exchanges"] if one["what"] == "sums of layers"]
    assert sums["turns"] == 12 * 2 * 2 * 4  # layers, attention and MLP, both ways, micro-batches
    assert sums["sent_bytes"] == 12 * 2 * 2 * 131_072 * 768 * 2  # 2 (n - 1) / n is 1
    # per layer: all of the norms and of o's and down's outputs, half of q, k, v, y, gate, up and their product
    kept = 12 * (4 * 768 + (4 * 768 + 3 * 2048) // 2) + 2 * 768
    assert data["memory"]["activations"] == 32 * 1024 * 2 * kept
    assert data["memory"]["weights"] == plain.chosen.memory["weights"] == 2 * NUMBERS


@pytest.mark.parametrize(
    ("gpus", "settings", "what"),
    [
        (9, {"mesh_tensor": 2}, "9 GPUs cannot be split into groups of 2"),
        (8, {"mesh_pipeline": 9}, "8 GPUs cannot be split into groups of 9"),
        (6, {"mesh_tensor": 2, "mesh_context": 2}, "6 GPUs cannot be split into groups of 4"),
        (1, {"mesh_context": 2}, "1 GPU cannot be split into groups of 2"),
    ],
)
def test_cards_that_make_no_whole_groups_are_refused(
    gpus: int, settings: dict[str, Any], what: str
) -> None:
    with pytest.raises(minillm.ConfigError, match=what):
        forecast(planned(**settings), gpus, None, "bfloat16")


def test_settings_choose_the_layout() -> None:
    off = forecast(planned(mesh_shard="off"), 8, None, "bfloat16").data()
    assert (off["updates"], off["otherwise"]["updates"]) == ("replicated", "sharded")
    assert off["owned"]["parameters"] == NUMBERS


def test_divided_weights_by_hand() -> None:
    plan = planned(mesh_shard="weights")
    data = forecast(plan, 8, None, "bfloat16").data()
    assert (data["updates"], data["otherwise"]["updates"]) == ("fully sharded", "sharded")
    sent = {one["what"]: one for one in data["exchanges"]}
    micro, ends = data["micro_batches"], plan.parameters["embedding.weight"].size + 768
    part = micro * 7 / 8
    assert sent["weights"]["sent_bytes"] == 2 * ((NUMBERS - ends) * part + ends * 7 / 8)
    assert sent["weights, again"]["sent_bytes"] == 2 * (NUMBERS - ends) * part
    assert sent["gradients"]["sent_bytes"] == 4 * NUMBERS * part
    assert sent["gradients"]["turns"] == 13 * micro
    assert sent["weights"]["turns"] == 12 * micro + 1
    matrices = 12 * (4 * 768**2 + 3 * 768 * 2048)
    vectors = 25 * 768
    for what in ("gradients to owners", "masters to owners", "masters of owners"):
        assert sent[what]["collective"] == "all-to-all"
        assert sent[what]["sent_bytes"] == 4 * (matrices + vectors) / 8 * 7 / 8


def test_larger_units_are_gathered_less_often() -> None:
    one, four = (
        forecast(planned(mesh_shard="weights", mesh_unit=unit), 8, None, "bfloat16").data()
        for unit in (1, 4)
    )
    turns, sent = (
        [{one["what"]: one[key] for one in data["exchanges"]} for data in (one, four)]
        for key in ("turns", "sent_bytes")
    )
    micro = one["micro_batches"]
    assert sent[0] == sent[1]
    assert [of["weights"] for of in turns] == [12 * micro + 1, 3 * micro + 1]
    assert [of["gradients"] for of in turns] == [13 * micro, 4 * micro]
    layer = 4 * 768**2 + 3 * 768 * 2048 + 2 * 768
    assert four["memory"]["weights"] - one["memory"]["weights"] == 2 * 2 * 3 * layer


def test_bytes_of_divided_weights_are_those_that_torch_holds() -> None:
    """docs/scale.md: between steps master rows and the moments in two processes; plus the layers in use."""
    matrices = 12 * (4 * 768**2 + 3 * 768 * 2048)  # one moment with muon, two with AdamW
    for plugins, moments in (("", 2 * NUMBERS), ("muon", 2 * NUMBERS - matrices)):
        found = forecast(planned(plugins, mesh_shard="weights"), 2, None, "float32").chosen.memory
        state = sum(size for name, size in found.items() if name.startswith("optimizer"))
        assert found["master weights"] + state == pytest.approx(2 * (NUMBERS + moments), rel=0.01)
        ends, layer = 50_304 * 768 + 768, 4 * 768**2 + 3 * 768 * 2048 + 2 * 768
        assert found["weights"] == 4 * (ends + 2 * layer)
        assert found["gradients"] == 4 * (ends + layer) + 4 * ends


@pytest.mark.broad(1)
@pytest.mark.parametrize(("memory", "shard"), [(20.5, "weights"), (21, "updates"), (1, "updates")])
def test_auto_divides_weights_where_updates_alone_do_not_fit(memory: float, shard: str) -> None:
    found = forecast(planned(train_rows=64), 8, f"h200,memory={memory * 1e9}", "bfloat16")
    assert found.shard == shard
    assert (found.chosen.updates == "fully sharded") == (shard == "weights")
    assert ("since updates alone would not fit" in " ".join(shown(found).split())) == (
        shard == "weights"
    )


@pytest.mark.slow
def test_weights_are_divided_where_updates_do_not_fit_at_the_start() -> None:
    """A card needs 1.21 GB in training, 1.39 before updates are sharded; sharded weights have no such peak."""
    sizes = {"train_rows": 1, "train_accumulate": 8, "train_seq_len": 64}
    said = "a card before the first step"
    chosen = forecast(planned(**sizes), 8, "h200,memory=1.3e9", "bfloat16")
    assert chosen.shard == "weights"
    assert said not in " ".join(shown(chosen).split())
    asked = forecast(planned(**sizes, mesh_shard="updates"), 8, "h200,memory=1.3e9", "bfloat16")
    assert said in " ".join(shown(asked).split())


def test_weights_are_not_divided_beside_shared_layers() -> None:
    with pytest.raises(minillm.ConfigError, match=r"beside mesh\.tensor"):
        forecast(planned(mesh_shard="weights", mesh_tensor=2), 8, None, "bfloat16")


@pytest.mark.broad(3)
@pytest.mark.parametrize(
    ("plugins", "settings", "memory", "sizes", "said"),
    [
        ("muon", {}, 30, (1, 1, 1), ""),
        ("muon", {}, 20.5, (1, 1, 1), ""),  # weights in parts fit
        ("muon", {}, 18, (2, 1, 1), "19.30 GiB of a card's 16.76 GiB, with it 12.46 GiB"),
        ("muon", {}, 12, (4, 1, 1), "train.rows=32 train.accumulate=32 also takes less"),
        ("moe", {}, 14, (1, 4, 1), "mesh.tensor=4"),  # refuses to share rows
        ("muon", {"mesh_context": 1}, 14, (1, 2, 1), "mesh.tensor=2: without it"),
        ("muon", {"mesh_context": 1, "mesh_tensor": 1}, 14, (1, 1, 1), ""),
        ("muon", {}, 1, (1, 1, 1), ""),  # nothing fits
        ("moe", {"mesh_shard": "weights"}, 14, (1, 1, 1), ""),  # not beside mesh.tensor
        ("muon", {"mesh_context_exchange": "heads"}, 12, (2, 1, 1), "mesh.context=2"),
        (
            "muon",
            {"train_rows": 2, "train_accumulate": 1},
            30,
            (4, 1, 1),
            "has 2 rows, and 8 processes",
        ),
        (
            "muon",
            {"train_rows": 1, "train_accumulate": 1},
            0.1,
            (4, 2, 1),
            "has 1 row, and 8 processes",
        ),
    ],
)
def test_open_sizes_are_1_unless_the_step_does_not_fit(
    plugins: str, settings: dict[str, Any], memory: float, sizes: tuple[int, ...], said: str
) -> None:
    plan = planned(plugins, **{"train_rows": 64, **settings})
    found = forecast(plan, 8, f"h200,memory={memory}e9", "bfloat16")
    mesh = found.data()["sizes"]
    assert (mesh["context"], mesh["tensor"], mesh["pipeline"]) == sizes
    assert bool(mesh["note"]) == bool(said)
    assert said in mesh["note"]
    assert mesh["note"] in " ".join(shown(found).split())
    if "with it" in said:
        assert found.chosen.bytes < memory * 1e9
    assert found.plan.hash == plan.hash


def test_what_does_not_fit_is_said() -> None:
    found = forecast(planned(train_rows=512), 2, "rtx4090", "bfloat16")
    text = shown(found)
    assert "does not fit" in text
    assert "fewer train.rows" in text


def shown(found: Forecast) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    for table in found.shown():
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("plugins", "settings", "what"),
    [
        ("muon", {"mesh_context": 2, "train_seq_len": 1026}, "rows of 1026 tokens cannot be cut"),
        ("sparse_loss", {"mesh_context": 2}, "'sparse_loss' chooses the supervised positions"),
        ("sparse_loss", {"mesh_tensor": 2}, "'sparse_loss' gathers the supervised positions"),
        ("fp8_mlp", {"mesh_tensor": 2}, "'fp8_mlp' computes the products of its linear layers"),
    ],
)
def test_a_mesh_that_training_refuses_has_no_figures(
    plugins: str, settings: dict[str, Any], what: str
) -> None:
    with pytest.raises(minillm.MinillmError, match=what):
        forecast(planned(plugins, **settings), 4, None, "bfloat16")


def test_neighbours_of_shared_rows_are_as_far_apart_as_those_of_layers() -> None:
    plan = planned(mesh_context=2, mesh_tensor=4)
    near, far = (
        forecast(plan, 8, card, "bfloat16").data()["exchanges"] for card in ("h200", "h200,host=4")
    )
    seconds_of = [{one["what"]: one["seconds"] for one in each} for each in (near, far)]
    assert seconds_of[1]["sums of layers"] == seconds_of[0]["sums of layers"]  # adjacent cards
    assert seconds_of[1]["keys and values"] > 3 * seconds_of[0]["keys and values"]


def test_what_training_refuses_is_said_beside_the_figures(eight: Forecast) -> None:
    assert eight.data()["refused"] is None
    assert "training refuses" not in shown(eight)
    found = forecast(planned(), 12, None, "bfloat16")
    text = " ".join(shown(found).split())
    assert "training refuses 12 processes cannot divide a step of 16 micro-batches" in text
    assert "or take 8 or 16 processes" in text
    assert "take 8 or 16 processes" in found.data()["refused"]


def test_recomputed_activations_cost_a_forward_pass_and_save_memory(eight: Forecast) -> None:
    plain, again = (
        eight.data(),
        forecast(planned(train_checkpointing=True), 8, None, "bfloat16").data(),
    )
    tokens, products = (
        524_288 // 8,
        4 * 768 * 768 + 2 * 768 * 2048,
    )  # q, k, v, o; gate, up; not down
    recomputed = 12 * (2 * products + 4 * 1024 * 768) * tokens
    assert again["recomputed_flops"] == pytest.approx(recomputed, rel=1e-6)
    assert again["flops"] == pytest.approx(plain["flops"] + recomputed)
    assert plain["recomputed_flops"] == 0
    grown = again["flops"] / plain["flops"]
    assert again["seconds"]["computing"] == pytest.approx(grown * plain["seconds"]["computing"])
    assert again["of_linear"] > plain["of_linear"]  # as much is sent beside more computing
    assert again["memory"]["activations"] < plain["memory"]["activations"] / 4


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [2, 8, 64, 1000])
def test_it_fits_into_80_columns(gpus: int) -> None:
    lines = shown(forecast(planned(), gpus, None, "bfloat16")).splitlines()
    assert max(map(len, lines)) <= 80
    words = " ".join(" ".join(lines).split())
    for part in (f"{gpus:,} GPUs h200", "of linear", "mesh.shard=off about", "all-gather"):
        assert part in words
    for assumed in ("peak, FLOP/s", "utilisation", "within a host", "between hosts", "data sheet"):
        assert assumed in words


Program = Callable[..., tuple[int, str, str]]
"""The fixture ``program``: exit code, stdout, stderr."""
PLAN = ("plan", "--preset", "gpt2-124m")


@pytest.mark.slow
def test_the_command_has_a_new_key_and_no_framework(program: Program) -> None:
    (_, plain, _), (_, with_gpus, said) = (
        program(*PLAN, "--json", *more) for more in ((), ("--gpus", "12"))
    )
    one, other = json.loads(plain), json.loads(with_gpus)
    assert other.pop("mesh")["gpus"] == 12
    assert one == other
    assert "12 processes cannot divide a step of 16 micro-batches of 32 rows" in said
    assert "or take 8 or 16 processes" in said
    watched = "import sys; from minillm_core.cli.main import main; sys.argv[1:] = sys.argv[1:]\n"
    watched += "try: main()\nexcept SystemExit: pass\n"
    watched += "print([n for n in ('torch', 'mlx') if n in sys.modules], file=sys.stderr)"
    line = [sys.executable, "-c", watched, *PLAN, "--gpus", "2", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--gpus", "2", "--card", "h99"), "there is no card 'h99'"),
        (("--gpus", "2", "--backend", "mlx"), "--gpus 2 is of NVIDIA GPUs"),
        (("--card", "h100"), "--card names the GPU of --gpus"),
        (("--gpus", "2", "--diff", "muon", "lion"), "--diff compares plans"),
        (("--gpus", "2000"), "the cost model does not cover this many"),
    ],
)
def test_the_command_refuses(words: tuple[str, ...], what: str, program: Program) -> None:
    code, out, err = program(*PLAN, *words)
    assert code == 2, err
    assert what in err
    assert not out


def test_cards_that_share_layers_by_hand() -> None:
    found = forecast(planned(mesh_pipeline=4), 8, None, "bfloat16")
    data = found.data()
    tokens, micro = 524_288 // 2, 8  # of each of two parts
    on, back = (one for one in data["exchanges"] if one["collective"] == "send")
    assert on["sent_bytes"] == back["sent_bytes"] == 2 * 768 * tokens  # of a stage in the middle
    assert on["turns"] == micro
    pipeline = data["pipeline"]
    assert pipeline["bubble"] == 3 / (micro + 3)
    assert [layer for one in pipeline["stages"] for layer in one["layers"]] == [*range(12)]
    most = max(one["flops_per_token"] for one in pipeline["stages"])
    assert data["flops"] == pytest.approx(most * tokens, rel=0.01)
    seconds = data["seconds"]
    assert seconds["bubble"] == pytest.approx(3 / micro * seconds["computing"])
    alone = planned().estimate("bfloat16").memory["activations"]
    held = [len(one["layers"]) / 12 * (4 - at) for at, one in enumerate(pipeline["stages"])]
    assert data["memory"]["activations"] == pytest.approx(alone * max(held))
    assert data["memory"]["pipeline buffers"] == 2 * 2 * 768 * tokens  # arrays and gradients
    single = planned(mesh_pipeline=4, mesh_schedule="gpipe", train_accumulate=1)
    reduce, *_ = forecast(single, 4, None, "bfloat16").data()["exchanges"]
    assert (reduce["collective"], reduce["sent_bytes"]) == ("reduce-scatter", 4 * NUMBERS * 3 / 4)
    longer = forecast(planned(mesh_pipeline=4, mesh_schedule="gpipe"), 8, None, "bfloat16").data()
    assert longer["memory"]["activations"] > 1.9 * data["memory"]["activations"]
    words = " ".join(shown(found).split())
    assert "4 stages of blocks" in words
    assert "27.3% of a step waiting" in words
    with pytest.raises(minillm.ConfigError, match="1f1b needs 12 micro-batches"):
        forecast(planned(mesh_pipeline=12, train_accumulate=8), 12, None, "bfloat16")


def test_cards_that_share_rows_by_hand() -> None:
    tokens = 524_288 // 2  # of each of two parts, which four cards share
    keys, heads = (
        forecast(planned(mesh_context=4, mesh_context_exchange=way), 8, None, "bfloat16").data()
        for way in ("keys", "heads")
    )
    gather, scatter = keys["exchanges"][2:]
    assert (gather["collective"], scatter["collective"]) == ("all-gather", "reduce-scatter")
    assert gather["sent_bytes"] == scatter["sent_bytes"] == 12 * 3 / 4 * 2 * 2 * 768 * tokens
    (both,) = heads["exchanges"][2:]
    assert both["sent_bytes"] == (gather["sent_bytes"] + scatter["sent_bytes"]) / 2
    assert both["turns"] == 4 * 12 * 8
    assert keys["tokens"] == tokens / 4
    assert keys["memory"]["keys and values"] == 12 * 32 * 1024 * 2 * 2 * 768  # of whole rows
    assert "keys and values" not in heads["memory"]
    for way, plain in (("keys", keys), ("heads", heads)):
        given = {"mesh_context": 4, "mesh_context_exchange": way, "train_checkpointing": True}
        again = forecast(planned(**given), 8, None, "bfloat16").data()
        for field in ("sent_bytes", "turns"):  # forward passes, with their collectives, run twice
            now, once = ([one[field] for one in met["exchanges"][2:]] for met in (again, plain))
            assert now == ([2 * once[0], once[1]] if way == "keys" else [1.5 * once[0]])
    looped = planned("layer_loop", mesh_context=4, mesh_context_exchange="keys")
    often = 12 + sum(most - 1 for _, most in looped.turns.values())
    data = forecast(looped, 8, None, "bfloat16").data()
    assert often > 12
    assert data["exchanges"][2]["turns"] == often * 8
    assert data["exchanges"][2]["sent_bytes"] == often / 12 * gather["sent_bytes"]
    assert data["memory"]["keys and values"] == often / 12 * keys["memory"]["keys and values"]
    auto = forecast(planned(mesh_context=4), 8, None, "bfloat16")
    assert auto.data()["context"] == {"cards": 4, "exchange": "heads"}
    assert auto.chosen.bytes < forecast(planned(), 2, None, "bfloat16").chosen.bytes
    assert "heads are exchanged for columns" in " ".join(shown(auto).split())
