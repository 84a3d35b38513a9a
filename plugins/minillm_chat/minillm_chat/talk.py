"""Chat with a trained run: its template, its special tokens, and streamed answers."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minillm_chat.chats import names_of
from minillm_chat.sandbox import ChatRefusedError
from minillm_chat.sft import Sft
from minillm_chat.templates import ASSISTANT, ChatTemplate, Message, Part
from minillm_core import DataError, Refusal, Run
from minillm_core.commands import InferenceOptions
from minillm_hf import tokenizer_facts


@dataclass
class ChatModel:
    """A run trained on chats.

    Attributes:
        run: the run.
        template: its chat template; "today" is the current date.
        begins: prepend the token that begins documents, as in training here; models of other programs
            start with their template's own text.
    """

    run: Run
    template: ChatTemplate
    begins: bool = True
    _names: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._names = names_of(self.template.specials)

    @classmethod
    def of(cls, run: Run) -> ChatModel:
        """Return the chat model of a run, with the template of its training.

        Raises:
            Refusal: the run was not trained on chats.
        """
        plugin = next((one.plugin for one in run.plan.active if isinstance(one.plugin, Sft)), None)
        own = run.out is None or os.path.lexists(run.out / "run.json")
        if plugin is None:
            what = (
                "the run was not trained on chats, so nothing says how it would answer"
                if own
                else "the model directory has no chat template, so nothing says how it would answer"
            )
            start = f"{'--branch' if own else '--init'} {shlex.quote(str(run.out))}"
            if own or not _takes_chatml(run):  # a run's vocabulary is full
                start += " sft.template=plain"
            raise Refusal(
                what,
                where=str(run.out or "run"),
                fix=f"minillm train --task sft --data chats.jsonl {start} --out CHAT",
            )
        return cls(run, replace(plugin.written_by, today=None), begins=own)

    def ids(self, parts: Sequence[Part]) -> list[int]:
        """Encode a rendered conversation as the start of a document, each part separately as in training."""
        return self.begun([one for part in parts for one in self.encoded(part)])

    def encoded(self, part: Part) -> list[int]:
        """Encode a part of a rendered conversation."""
        tokenizer = self.run.tokenizer
        assert tokenizer is not None  # chats are text
        if part.special:
            return [self.run.specials[self._names[part.text]]]
        return tokenizer.encode([part.text])[0].tolist()

    def begun(self, ids: list[int]) -> list[int]:
        """Prepend the token that begins documents, where it is not the first one already."""
        assert self.run.tokenizer is not None
        beginning = self.run.tokenizer.end_of_text
        return ids if not self.begins or ids[:1] == [beginning] else [beginning, *ids]

    @property
    def ends(self) -> list[int]:
        """The ids that end an answer."""
        return [self.run.specials[self._names[text]] for text in sorted(self.template.ends)]

    def answer(
        self, messages: list[Message], *, tools: Any = None, **sampling: Any
    ) -> Iterator[str]:
        """Generate the answer to a conversation, yielding pieces as they are sampled.

        Args:
            messages: the conversation; the model answers the last one.
            tools: descriptions of tools.
            sampling: see :meth:`minillm_core.Run.stream`.

        Raises:
            Refusal: the template rejects the conversation.
        """
        try:
            prompt = self.ids(self.template.prompt(messages, tools=tools))
        except ChatRefusedError as error:
            raise Refusal(
                f"this conversation cannot be written: {error.reason}",
                where="the run's chat template",
                fix="leave --system out, if the template knows no system turn",
            ) from error
        return self.run.stream(prompt, ends=self.ends, **sampling)


def _takes_chatml(run: Run) -> bool:
    """Return whether the tokenizer has the special tokens of chatml, or the embedding rows for them."""
    if run.tokenizer is None:
        return False
    added = json.loads(run.tokenizer.text())["added_tokens"]
    known = {one["content"] for one in added if one["special"]}
    missing = {*ChatTemplate.of("chatml").specials} - known
    return run.tokenizer.size + len(missing) <= run.plan.config.model.vocab


@dataclass
class Talk:
    """A conversation of several turns.

    Attributes:
        model: generates the answers.
        sampling: sampling settings.
        messages: the conversation so far.
    """

    model: ChatModel
    sampling: dict[str, Any]
    messages: list[Message] = field(default_factory=list)

    def ask(self, content: str) -> Iterator[str]:
        """Ask a question, and yield the answer piece by piece; the yielded text is added to the messages.

        Where the caller stops early, the answer ends there.
        """
        question: Message = {"role": "user", "content": content}
        turn, said = len(self.messages), ""
        seed = self.sampling.get("seed", 0) + turn
        pieces = self.model.answer([*self.messages, question], **{**self.sampling, "seed": seed})
        try:
            for piece in pieces:
                shown = piece if said else piece.lstrip()  # a template may begin answers by a space
                said += shown
                if shown:
                    yield shown
        finally:
            self.messages += [question, {"role": ASSISTANT, "content": said}]


def chat_of_directory(out: Path) -> dict[str, Any]:
    """Read the chat template of a model directory as settings of the plugin ``sft``.

    Returns:
        The settings; empty for a run, which records its own template, and without a template.

    Raises:
        Refusal: tokenizer_config.json or chat_template.jinja cannot be read.
    """
    own = os.path.lexists(out / "run.json")
    template = None if own else tokenizer_facts(out)["chat_template"]
    return {} if template is None else {"sft.template": template, "sft.add": False}


def open_chat(out: Path, read: InferenceOptions, shown: Any) -> Run:
    """Open a run, or a model directory with its own chat template.

    Args:
        out: the folder.
        read: the command's options of inference.
        shown: displays notes and progress.

    Raises:
        Refusal: the folder holds neither a run nor a model.
    """
    if given := chat_of_directory(out):
        read = replace(read, plugins=",".join(filter(None, ["sft", read.plugins])))
    return read.open(out, shown, given or None)


def check_text(content: str, where: str) -> str:
    """Return typed text unchanged, if valid.

    Raises:
        DataError: the text is not UTF-8.
    """
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            "what was typed is not UTF-8",
            where=f"{where}, character {error.start}",
            fix="use UTF-8 in the terminal, or in the file that it comes from",
        ) from error
    return content
