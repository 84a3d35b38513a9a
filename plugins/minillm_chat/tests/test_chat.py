"""Conversations with a run, from Python and in a terminal or a pipe."""

from __future__ import annotations

import io
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import minillm_core as minillm
from minillm_chat.talk import ChatModel, Talk
from minillm_chat.templates import ASSISTANT
from minillm_core.cli.main import main

QUESTION = {"role": "user", "content": "What is {} plus one, and why?"}
ANSWER = {"role": ASSISTANT, "content": "It is more, my friend."}


class Stdin(io.TextIOWrapper):
    """A stand-in for stdin: text of a terminal or of a pipe."""

    def __init__(self, content: bytes, typed: bool = False) -> None:
        super().__init__(io.BytesIO(content), "utf-8")
        self.typed = typed

    def isatty(self) -> bool:
        return self.typed


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run minillm chat; return exit code, stdout and stderr."""

    def run(
        out: Path, *words: str, stdin: bytes = b"", typed: bool = False
    ) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", Stdin(stdin, typed))
        code = main(["chat", str(out), *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.mark.parametrize("template", ["chatml", "plain"])
def test_a_prompt_has_the_ids_of_training(trained: Any, template: str) -> None:
    run = minillm.Run.open(trained(sft__template=template))
    model = ChatModel.of(run)
    asked = model.ids(model.template.prompt([QUESTION]))
    whole = model.ids(model.template.parts([QUESTION, ANSWER]))
    assert run.tokenizer is not None
    assert asked == whole[: len(asked)]
    assert asked[0] == run.tokenizer.end_of_text
    text = run.tokenizer.decode(asked[1:], specials=True)
    assert text == model.template.render([QUESTION], prompt=True)
    assert whole[len(asked) :].count(model.ends[0]) == 1


def test_a_stream_is_what_is_generated_and_ends_where_it_is_told(trained: Any) -> None:
    run = minillm.Run.open(trained())
    whole = run.generate("It", temperature=0, max_tokens=12)
    assert "It" + "".join(run.stream("It", temperature=0, max_tokens=12)) == whole
    tokenizer = run.tokenizer
    assert tokenizer is not None
    ids = [tokenizer.end_of_text, *tokenizer.encode(["It"])[0].tolist()]
    assert "It" + "".join(run.stream(ids, temperature=0, max_tokens=12)) == whole
    drawn = run.writer().generate(ids, minillm_sampling(), tokens=12)
    third = list(drawn)[2]
    ended = run.writer().generate(ids, minillm_sampling(), tokens=12, ends=[third])
    assert third not in list(ended)
    assert ended.ended


def minillm_sampling() -> Any:
    from minillm_core.train.generate import Sampling

    return Sampling(0)


class Told:
    """A stand-in for a model: returns given answers, and records the prompts."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers, self.asked = list(answers), list[Any]()

    def answer(self, messages: list[Any], **sampling: Any) -> Iterator[str]:
        self.asked.append((list(messages), sampling["seed"]))
        yield from self.answers.pop(0)


def test_what_was_said_is_remembered_also_where_it_was_broken_off() -> None:
    model = Told(["a", "b"], ["c", "d"])
    talk = Talk(model, {"seed": 5})  # type: ignore[arg-type]
    assert list(talk.ask("1")) == ["a", "b"]
    pieces = talk.ask("2")
    assert next(pieces) == "c"
    pieces.close()
    contents = [message["content"] for message in talk.messages]
    assert contents == ["1", "ab", "2", "c"]
    assert [seed for _, seed in model.asked] == [5, 7]
    assert [len(messages) for messages, _ in model.asked] == [1, 3]


def test_every_line_of_a_pipe_is_a_turn(trained: Any, chat: Any) -> None:
    words = ("--seed", "1", "--max-tokens", "5")
    code, out, err = chat(trained(), *words, "--json", stdin=b"Hi\n\nAnd now?\n")
    assert code == 0, err
    found = json.loads(out)
    assert [one["role"] for one in found["messages"]] == ["user", ASSISTANT] * 2
    answers = [one["content"] for one in found["messages"] if one["role"] == ASSISTANT]
    assert (found["seed"], found["step"]) == (1, 2)
    code, out, _ = chat(trained(), *words, stdin=b"Hi\nAnd now?")
    assert (code, out) == (0, "".join(f"{answer}\n" for answer in answers))


def test_a_system_turn_comes_first_and_the_seed_is_shown(trained: Any, chat: Any) -> None:
    words = ("--system", "Be brief.", "--max-tokens", "3", "--json")
    code, out, err = chat(trained(), *words, stdin=b"Hi\n")
    found = json.loads(out)
    assert (code, found["messages"][0]) == (0, {"role": "system", "content": "Be brief."})
    assert f"--seed {found['seed']}" in err


def test_ctrl_c_ends_an_answer_in_a_terminal_and_the_conversation_in_a_pipe(
    trained: Any, chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **more: Any) -> Iterator[str]:
        yield "begun"
        raise KeyboardInterrupt

    monkeypatch.setattr("minillm_core.train.run.Run.stream", broken)
    code, out, err = chat(trained(), "--temperature", "0", stdin=b"Hi\nAgain\n", typed=True)
    assert (code, out) == (0, "begun\nbegun\n")
    assert err.count("> ") == 3
    code, out, err = chat(trained(), "--temperature", "0", stdin=b"Hi\nAgain\n")
    assert (code, out) == (130, "begun\n")
    assert "the conversation ends here" in err


def test_the_model_is_loaded_before_the_first_turn(
    trained: Any, chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during an answer must not break off the import of a framework: the next one would crash."""
    loaded, load = list[minillm.Run](), minillm.Run.writer
    monkeypatch.setattr(minillm.Run, "writer", lambda run: loaded.append(run) or load(run))
    assert chat(trained(), "--temperature", "0", stdin=b"") == (0, "", "")
    assert len(loaded) == 1


def test_a_note_on_an_answer_is_below_it(
    trained: Any, chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr("minillm_chat.cli.chat.say", said.append)
    monkeypatch.setattr(
        "minillm_chat.cli.chat.write", lambda text, end="\n": said.append(text + end)
    )
    words = ("--temperature", "0", "--max-tokens", "70")
    assert chat(trained(), *words, stdin=b"Hi\n")[0] == 0
    *answer, end, note = said
    assert "".join(answer).strip()
    assert (end, note) == ("\n", "the model sees 64 tokens at most: it continues from the last 32")


@pytest.mark.parametrize(
    ("words", "stdin", "said"),
    [
        (("--temperature", "-1"), b"Hi\n", "temperature cannot be -1.0"),
        ((), b"\xff\n", "not UTF-8"),
        (("--system", "a\udcffb"), b"Hi\n", "not UTF-8"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    trained: Any, chat: Any, words: tuple[str, ...], stdin: bytes, said: str
) -> None:
    code, _, err = chat(trained(), *words, stdin=stdin)
    assert (code, said in err) == (2, True), err


def test_a_run_that_knows_no_chats_is_refused(trained: Any, chat: Any) -> None:
    code, _, err = chat(trained(plugins=None), stdin=b"Hi\n")
    assert code == 2
    assert "was not trained on chats" in err
    assert "--task sft" in err
    assert err.rstrip().endswith(" sft.template=plain --out CHAT")  # its vocabulary is full


@pytest.mark.parametrize(("vocab", "plain"), [(258, True), (600, False)])
def test_a_directory_without_a_template_gets_a_command_that_its_tokenizer_allows(
    trained: Any, chat: Any, tmp_path: Path, vocab: int, plain: bool
) -> None:
    """With rows to spare, the special tokens of chatml are added."""
    minillm.Run.open(trained(plugins=None, model__vocab=vocab)).export(tmp_path / "model")
    code, _, err = chat(tmp_path / "model", stdin=b"Hi\n")
    assert code == 2
    more = " sft.template=plain" * plain
    assert err.rstrip().endswith(f" --init {tmp_path / 'model'}{more} --out CHAT")
    data = trained()
    data = data.with_name(data.name.replace("run-", "data-") + ".jsonl")
    words = ["--preset", "tiny", "--steps", "1", "train.seq_len=64", "train.rows=4", *more.split()]
    words += ["--task", "sft", "--data", str(data), "--init", str(tmp_path / "model")]
    assert main(["train", *words, "eval.samples=0", "--out", str(tmp_path / "chat")]) == 0


def test_a_directory_with_a_template_answers_as_the_run_does(
    trained: Any, chat: Any, tmp_path: Path
) -> None:
    words = ("--temperature", "0", "--max-tokens", "6", "--json")
    minillm.Run.open(trained()).export(tmp_path / "model")
    answers = []
    for out in (trained(), tmp_path / "model"):
        code, said, err = chat(out, *words, stdin=b"Hi\nAnd now?\n")
        assert code == 0, err
        answers.append(json.loads(said)["messages"])
    assert answers[0] == answers[1]
    path = tmp_path / "model" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    template = config.pop("chat_template")
    path.write_text(json.dumps(config))
    code, _, err = chat(path.parent, *words, stdin=b"Hi\n")
    assert (code, "has no chat template" in err) == (2, True)
    assert "sft.template" not in err  # its tokenizer has the special tokens of chatml
    (path.parent / "chat_template.jinja").write_text(template)
    code, said, err = chat(path.parent, *words, stdin=b"Hi\nAnd now?\n")
    assert json.loads(said)["messages"] == answers[0], err
    path.write_text("{")
    code, _, err = chat(path.parent, *words, stdin=b"Hi\n")
    assert (code, "tokenizer_config.json cannot be read" in err) == (2, True)


def test_a_prompt_of_a_directory_is_its_template_and_no_more(trained: Any) -> None:
    run = minillm.Run.open(trained())
    model = ChatModel.of(run)
    parts = model.template.prompt([QUESTION])
    assert model.ids(parts) == [model.ids([])[0], *ChatModel(run, model.template, False).ids(parts)]


def test_a_template_that_refuses_a_turn_says_so(trained: Any, chat: Any) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    out = trained(sft__template=source, sft__tokens=["<|end|>", "<|assistant|>", "<|user|>"])
    code, _, err = chat(out, "--system", "Be brief.", stdin=b"Hi\n")
    assert (code, "no system" in err) == (2, True)
    assert "sft.template" not in err
    code, _, _ = chat(out, "--max-tokens", "2", stdin=b"Hi\n")
    assert code == 0


def named(*texts: str) -> dict[str, Any]:
    listed = [*texts, "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    return {
        "added_tokens_decoder": {n: {"content": t, "special": True} for n, t in enumerate(listed)}
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (named(""), "'' cannot be told from text as a special token"),
        (named("a"), "'a' cannot be told from text as a special token"),
        (named("<|im_"), "the tokenizer has no special token <|im_"),
        ({"added_tokens_decoder": [1]}, "there is no chat template in"),
        ({"added_tokens_decoder": {"0": ["x"]}}, "there is no chat template in"),
        ({"added_tokens_decoder": {"0": {"content": 5, "special": True}}}, "no chat template in"),
        ({"chat_template": 5}, "there is no chat template in"),
        ({"chat_template": [{"name": "tool", "template": "x"}]}, "there is no chat template in"),
        ({"chat_template": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}"}, "recursion"),
        ({"chat_template": "{{ cycler.__init__.__globals__.os.system('true') }}"}, "unsafe"),
        ({"chat_template": "{{ raise_exception('\x1b]0;evil\x07' * 99) }}"}, "the template says"),
        ({"chat_template": "x" * 3_000_000}, "more than 2,097,152 bytes of JSON"),
        ({"eos_token": {"content": ["x"]}}, "for eos_token, which is not a token"),
        ({"bos_token": "x" * 1_000_000}, "for bos_token, which is not a token"),
        ({"bos_token": "<no\x1b[2J>", "add_bos_token": True}, "with which its texts begin"),
        ({"auto_map": {"AutoTokenizer": ["evil.T", None]}}, "names code"),
    ],
)
def test_a_hostile_tokenizer_config_is_refused(
    trained: Any, chat: Any, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    minillm.Run.open(trained()).export(tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    code, out, err = chat(path.parent, stdin=b"Hi a <|im_start|>\n")
    assert (code, out.strip()) == (2, "")
    assert said in err
    assert "\x1b" not in err
    assert len(err) < 4000


def test_names_of_special_tokens_may_collide(trained: Any, chat: Any, tmp_path: Path) -> None:
    minillm.Run.open(trained()).export(tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | named("<im_start>", "\x1b]0;evil\x07")))
    words = ("--temperature", "0", "--max-tokens", "4")
    code, said, err = chat(path.parent, *words, stdin=b"Hi\n")
    assert code == 0, err
    assert said == chat(trained(), *words, stdin=b"Hi\n")[1]


def test_a_pickle_in_the_place_of_the_weights_is_not_run(
    trained: Any, chat: Any, tmp_path: Path
) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "pwned",))

    model = tmp_path / "model"
    minillm.Run.open(trained()).export(model)
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    code, _, err = chat(model, "--max-tokens", "2", stdin=b"Hi\n")
    assert code == 0
    assert "a pickle, which may run code, and is not read" in err
    (model / "model.safetensors").unlink()
    code, _, err = chat(model, stdin=b"Hi\n")
    assert code == 2
    assert "only pytorch_model.bin is there" in err
    (model / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    code, _, err = chat(model, stdin=b"Hi\n")
    assert code == 2
    assert "not a sound safetensors file" in err
    assert not (tmp_path / "pwned").exists()


def test_a_run_that_starts_from_a_directory_has_its_template(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    out = trained(sft__template=source, sft__tokens=["<|end|>", "<|assistant|>", "<|user|>"])
    minillm.Run.open(out).export(tmp_path / "model")
    data = out.with_name(out.name.replace("run-", "data-") + ".jsonl")
    init = ["--init", str(tmp_path / "model")]
    words = ["train", "--data", str(data), "--preset", "tiny", "--steps", "1", *init]
    words += ["train.seq_len=64", "train.rows=4", "eval.samples=0"]
    assert main([*words, "--task", "sft", "--out", str(tmp_path / "chat")]) == 0
    assert "sft.template comes from the model directory" in capsys.readouterr().err
    assert ChatModel.of(minillm.Run.open(tmp_path / "chat")).template.source.endswith(source)
    named = [*words, "--task", "sft", "--out", str(tmp_path / "plain"), "sft.template=plain"]
    assert main(named) == 0
    assert "sft.template is that" not in capsys.readouterr().err
    assert minillm.Run.open(tmp_path / "plain").plan.config.plugins["sft"] == {"template": "plain"}
