"""HarnessModel gives the same results as the exported model under the harness's own class."""

from __future__ import annotations

import importlib.util
import json
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import minillm_core as minillm
from minillm_core.cli.main import main
from minillm_core.commands import display, say
from minillm_eval.harness import HarnessModel
from minillm_eval.judge import judge_tasks, known, prepare

BACKENDS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(not importlib.util.find_spec(name), reason=f"{name} is not here"),
    )
    for name in ("torch", "mlx")
]
PAIRS = [
    ("", "the quick"),
    ("the quick", " brown fox"),
    ("the quick ", "brown"),
    ("lazy dogs while seven old men sing " * 6, "of love"),  # longer than a row
    ("x", "y<|endoftext|>z"),
]


@pytest.fixture
def few_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the harness one of its own folders of tasks: to list all of them takes it twenty seconds."""
    from lm_eval.tasks import manager

    few = tmp_path / "own"
    shutil.copytree(Path(manager.__file__).parent / "hellaswag", few / "hellaswag")
    monkeypatch.setattr(manager, "__file__", str(few / "manager.py"))


def asked(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


def reference(run: minillm.Run, context: list[int], wanted: list[int]) -> tuple[float, bool]:
    """Compute the reference result from the logits of one row, token by token, in float64."""
    ids = [*context, *wanted][-(run.plan.config.train.seq_len + 1) :]
    logits = run.logits(ids[:-1]).astype(np.float64)[-len(wanted) :]
    logs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logs -= logits.max(-1, keepdims=True)
    picked = logs[np.arange(len(wanted)), wanted]
    return float(picked.sum()), bool((logits.argmax(-1) == wanted).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_continuations_are_measured_as_by_their_logits(trained: Path, backend: str) -> None:
    run = minillm.Run.open(trained, backend=backend, device="cpu")
    model = HarnessModel(run)
    found = model.loglikelihood(asked(*PAIRS))
    assert run.tokenizer is not None
    start = run.tokenizer.end_of_text
    for (context, text), (nats, likeliest) in zip(PAIRS, found, strict=True):
        moved = context[len(context.rstrip()) :] + text  # spaces go to the continuation
        ids = [start, *run.tokenizer.encode([context.rstrip()])[0]]
        whole = [start, *run.tokenizer.encode([context.rstrip() + moved])[0]]
        expected, greedy = reference(run, ids, [int(one) for one in whole[len(ids) :]])
        assert nats == pytest.approx(expected, abs=1e-4)
        assert likeliest == greedy
    # the model's own greedy continuation is the likeliest, on every backend
    said = "".join(run.stream("the quick", max_tokens=3, temperature=0))
    ((_, likeliest),) = model.loglikelihood(asked(("the quick", said)))
    assert likeliest or len(run.tokenizer.encode([said])[0]) != 3


@pytest.mark.parametrize("context", ["the qui", "the quic"])
def test_a_continuation_that_is_merged_into_its_context_is_measured_alone(
    trained: Path, context: str
) -> None:
    run = minillm.Run.open(trained)
    assert run.tokenizer is not None
    text = "the quick".removeprefix(context)
    ids, wanted, whole = (
        run.tokenizer.encode([one])[0].tolist() for one in (context, text, context + text)
    )
    assert len(whole) <= len(ids)
    ((nats, likeliest),) = HarnessModel(run).loglikelihood(asked((context, text)))
    expected, greedy = reference(run, [run.tokenizer.end_of_text, *ids], wanted)
    assert nats == pytest.approx(expected, abs=1e-4)
    assert nats < -0.1
    assert likeliest == greedy


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_are_losses_and_say_what_is_likeliest(trained: Path, backend: str) -> None:
    run = minillm.Run.open(trained, backend=backend, device="cpu")
    random = np.random.default_rng(0)
    rows = [random.integers(0, 300, n) for n in (2, 9, 49)]
    for ids, nats, (scored, likeliest) in zip(
        rows, run.losses(rows), run.scores(rows), strict=True
    ):
        assert scored.shape == likeliest.shape == nats.shape == (len(ids) - 1,)
        np.testing.assert_allclose(scored, nats, atol=2e-5)
        np.testing.assert_array_equal(likeliest, run.logits(ids[:-1]).argmax(-1) == ids[1:])
    with pytest.raises(minillm.DataError, match="row of 1 ids"):
        run.scores([[3]])


def test_a_text_is_measured_whole_in_windows(trained: Path) -> None:
    run = minillm.Run.open(trained)
    assert run.tokenizer is not None
    texts = ["the quick brown", "seven old men sing of love and war " * 20]
    found = HarnessModel(run).loglikelihood_rolling(asked(*((one,) for one in texts)))
    longest = run.plan.config.train.seq_len
    for text, total in zip(texts, found, strict=True):
        ids = [run.tokenizer.end_of_text, *run.tokenizer.encode([text])[0].tolist()]
        first = ids[: longest + 1]
        expected = reference(run, first[:1], first[1:])[0]
        place = len(first)
        while place < len(ids):  # each later token sees as much as a row has room for
            end = min(place + longest, len(ids))
            expected += reference(run, ids[max(end - longest - 1, 0) : place], ids[place:end])[0]
            place = end
        assert total == pytest.approx(expected, abs=1e-3)


def test_answers_end_at_a_stop_and_have_room(trained: Path) -> None:
    run, heard = minillm.Run.open(trained), list[str]()
    model = HarnessModel(run, say=heard.append)
    rules = [
        {"until": [" "], "max_gen_toks": 8},
        {"until": [], "max_gen_toks": 500, "num_beams": 2},
    ]
    rules.append(rules[-1])
    short, long, _ = model.generate_until(asked(*(("the quick brown fox", one) for one in rules)))
    assert " " not in short
    whole = "".join(run.stream("the quick brown fox", max_tokens=24, temperature=0))
    assert long == whole
    assert whole.startswith(short)
    room, ignored = heard
    assert "at most 24 tokens" in room
    assert "num_beams of a task's generation_kwargs has no effect here" in ignored


def test_an_answer_has_no_space_that_decoding_drops(tmp_path: Path) -> None:
    native = tokenizers.Tokenizer(models.BPE())
    native.pre_tokenizer, native.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(special_tokens=["<|endoftext|>"], vocab_size=60)
    native.train_from_iterator([text := "the quick brown fox sings of love"] * 2, trainer)
    native.save(str(tmp_path / "t.json"))
    (tmp_path / "text.txt").write_text(text * 40)
    settings = {
        **{"model.layers": 1, "model.dim": 32, "model.heads": 2, "model.vocab": 64},
        **{"train.seq_len": 16, "train.rows": 2, "train.steps": 1, "eval.samples": 0},
        "data.tokenizer": str(tmp_path / "t.json"),
    }
    loaded = minillm.load("tiny", plugins=[], data=tmp_path / "text.txt", settings=settings)
    with minillm.Run(minillm.build_plan(loaded), cache=tmp_path / "cache") as run:
        run.train()
        model, seeds, rule = HarnessModel(run), range(12), {"temperature": 5.0, "max_gen_toks": 4}
        given = model.generate_until(asked(*(("the quick", rule) for _ in seeds)))
        prompt, dropped = model.tok_encode("the quick"), 0
        for seed, answer in zip(seeds, given, strict=True):
            drawn = run.stream(prompt, max_tokens=4, temperature=5.0, seed=seed)
            dropped += "".join(drawn) != answer
            assert run.tokenizer is not None
            assert answer == run.tokenizer.decode(drawn.generation.ids)
        assert dropped


def test_top_p_of_0_draws_the_likeliest(trained: Path) -> None:
    model = HarnessModel(minillm.Run.open(trained))
    rules = [{"max_gen_toks": 9, **one} for one in ({}, {"temperature": 5.0, "top_p": 0})]
    greedy, drawn = model.generate_until(asked(*(("the quick", one) for one in rules)))
    assert drawn == greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_gen_toks", "many"),
        ("max_gen_toks", float("inf")),
        ("max_gen_toks", 0),
        ("temperature", None),
        ("until", [5]),
    ],
)
def test_settings_of_a_task_that_cannot_be_read_are_refused(
    trained: Path, name: str, value: Any
) -> None:
    model = HarnessModel(minillm.Run.open(trained))
    with pytest.raises(minillm.Refusal, match="generation_kwargs of a task cannot be read") as told:
        model.generate_until(asked(("the quick", {name: value})))
    assert name in str(told.value)


def test_a_run_of_ids_is_refused() -> None:
    run: Any = SimpleNamespace(tokenizer=None, out=Path("here"))
    with pytest.raises(minillm.Refusal, match="no tokenizer"):
        HarnessModel(run)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the harness, its data library and Transformers
def test_the_figures_are_those_of_the_exported_model_in_the_harness(
    few_tasks: None,
    trained: Path,
    tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    assert main(["export", str(trained), "--to", str(tmp_path / "model")]) == 0
    names = ["toy_choice", "toy_word", "toy_text", "toy_answer"]
    expected = {}
    pairs = [("the quick", " brown fox"), ("", "seven old"), ("lazy dogs " * 30, "sing of")]
    for starts, some in ((True, ["toy_choice", "toy_word", "toy_answer"]), (False, ["toy_text"])):
        theirs = HFLM(
            pretrained=str(tmp_path / "model"),
            device="cpu",
            batch_size=3,
            add_bos_token=starts,
            logits_cache=False,  # it confuses windows where a text repeats itself
        )
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        loaded = manager.load(some)
        for task in loaded["tasks"].values():
            task.set_config(key="num_fewshot", value=0)
        expected |= evaluate(theirs, loaded, bootstrap_iters=0)["results"]
        if starts:
            both = [
                model.loglikelihood(asked(*pairs))
                for model in (theirs, HarnessModel(minillm.Run.open(trained)))
            ]
            for (nats, greedy), (ours, likeliest) in zip(*both, strict=True):
                assert ours == pytest.approx(nats, abs=1e-4)
                assert likeliest == greedy
    capsys.readouterr()
    words = ["--tasks", ",".join(names), "--task-path", str(tasks), "--json"]
    for place in (trained, tmp_path / "model"):
        before = (trained / "metrics.jsonl").read_text().count("\n")
        assert main(["eval", str(place), *words]) == 0
        found = json.loads(capsys.readouterr().out)
        for name in names:
            for key, value in expected[name].items():
                metric = key.removesuffix(",none")
                if metric in ("alias", "sample_len", "name") or "stderr" in metric:
                    continue
                assert found["tasks"][name][metric] == pytest.approx(value, rel=1e-5), name
            assert found["tasks"][name]["documents"] == 24
        lines = (trained / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == before + (place == trained)
    (judged,) = [one for one in map(json.loads, lines) if one["event"] == "judged"]
    assert judged["judge"] == "tasks"
    assert judged["step"] == 30
    assert judged["figures"]["tasks"]["toy_choice"]["acc"] == expected["toy_choice"]["acc,none"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_limit_and_shots_and_what_cannot_be_asked(
    few_tasks: None, trained: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(trained), "--task-path", str(tasks)]
    assert main([*words, "--tasks", "toy_choice", "--limit", "5", "--shots", "2"]) == 0
    printed = capsys.readouterr()
    lines = [line.split() for line in printed.out.splitlines()]
    assert ["documents", "5"] in lines
    assert ["shots", "2"] in lines
    assert "measuring continuations" not in printed.out
    assert main([*words, "--tasks", "hellaswag"]) == 2
    assert "the data of a task is not available" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_names_of_tasks(tasks: Path) -> None:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    assert known(["toy_word", "toy_*", "toy_word"], manager)[0] == "toy_word"
    assert len(known(["toy_*", "toy_word"], manager)) == 4
    with pytest.raises(minillm.Refusal, match="there is no task 'toy_chioce'") as error:
        known(["toy_chioce"], manager)
    assert "did you mean toy_choice" in str(error.value)


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ({"UNSAFE_CODE": True}, "runs the code that a model writes"),
        ({"MULTIMODAL": True}, "shows images"),
        ({"num_fewshot": 0}, "is posed without examples"),
    ],
)
def test_tasks_that_are_not_asked(said: dict[str, Any], fix: str) -> None:
    task = SimpleNamespace(**said, get_config=said.get)
    with pytest.raises(minillm.Refusal, match=fix):
        prepare("one", task, 3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("line", "body", "said", "fix"),
    [
        ("doc_to_text: '{{nothing.deeper}}'", "", "'nothing' is undefined", "correct its YAML"),
        ("doc_to_choice: '{{options}}'", "", "'options' is undefined", "correct its YAML"),
        ("doc_to_target: 99", "", "IndexError list index out of range", "correct its YAML"),
        (
            "doc_to_text: '{{question if answer == 0 else nothing}}'",  # not of the first document
            "",
            "'nothing' is undefined",
            "correct its YAML",
        ),
        ("process_docs: !function own.f", "import absent.part", "absent", "pip install absent"),
        (
            "process_results: !function own.f",
            "def f(*given):\n    import absent",
            "absent",
            "pip install absent",
        ),
        ("process_docs: !function own.f", "raise ImportError('too old')", "too old", "mend it"),
    ],
)
def test_a_task_with_a_defect_is_refused(
    few_tasks: None,
    trained: Path,
    tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    line: str,
    body: str,
    said: str,
    fix: str,
) -> None:
    key = line.partition(":")[0]
    lines = (tasks / "toy_choice.yaml").read_text().splitlines()
    kept = [one for one in lines if not one.startswith(f"{key}:")]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "own.py").write_text(body)
    (mine / "mine.yaml").write_text("\n".join([*kept, line]).replace("toy_choice", "mine"))
    words = ["--tasks", "mine", "--task-path", str(mine), "--limit", "3"]
    assert main(["eval", str(trained), *words]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert fix in printed


def test_an_error_of_the_model_stays_a_defect(
    few_tasks: None, trained: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: HarnessModel, requests: list[Any], **options: Any) -> None:
        raise KeyError("of the model")

    monkeypatch.setattr(HarnessModel, "loglikelihood", broken)
    with pytest.raises(KeyError, match="of the model"), display(say) as shown:
        judge_tasks(minillm.Run.open(trained), ["toy_word"], shown, task_path=[tasks], limit=1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tasks", "a", "--chats", "b"), "one of --data, --chats and --tasks"),
        (("--tasks", "a", "--pattern", "b"), "--pattern has no effect beside --tasks"),
        (("--chats", "a", "--shots", "1"), "--shots has no effect beside --chats"),
        (("--tasks", "a", "--task-path", "/nowhere"), "/nowhere is not a folder"),
        (("--tasks", ","), "no task is named"),
    ],
)
def test_what_has_no_effect_is_refused(
    trained: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert main(["eval", str(trained), *words]) == 2
    assert said in capsys.readouterr().err


def test_without_the_harness_its_pip_line_is_said(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("minillm_eval.judge.version", absent)
    assert main(["eval", str(trained), "--tasks", "a"]) == 2
    assert "pip install 'minillm-eval[harness]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [(("--tasks", "a"), "pip install 'minillm-eval[harness]'"), (("--chats", "a"), "minillm-chat")],
)
def test_without_the_distribution_the_pip_line_is_said(
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    line: str,
) -> None:
    monkeypatch.setattr("minillm_core.cli.evaluate.provided", lambda group, name: None)
    assert main(["eval", str(trained), *words]) == 2
    assert line in capsys.readouterr().err
