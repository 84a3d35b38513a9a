"""A conversation with a run: its template, its special tokens, and answers that stream."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
    """A run that was trained on chats.

    Attributes:
        run: the run.
        template: how it writes conversations; today's date is that of the day.
        begins: the token that begins documents comes first, as in training here; a model of another
            program begins with what its template writes.
    """

    run: Run
    template: ChatTemplate
    begins: bool = True
    _names: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._names = names_of(self.template.specials)

    @classmethod
    def of(cls, run: Run) -> ChatModel:
        """Take the template that a run was trained with.

        Raises:
            Refusal: it was not trained on chats.
        """
        plugin = next((one.plugin for one in run.plan.active if isinstance(one.plugin, Sft)), None)
        own = run.out is None or os.path.lexists(run.out / "run.json")
        if plugin is None:
            what = (
                "the run was not trained on chats, so nothing says how it would answer"
                if own
                else "the model directory has no chat template, so nothing says how it would answer"
            )
            start = f"{'--branch' if own else '--init'} {run.out}"
            raise Refusal(
                what,
                where=str(run.out or "run"),
                fix=f"minillm train --task sft --data chats.jsonl {start} --out CHAT",
            )
        return cls(run, replace(plugin.written_by, today=None), begins=own)

    def ids(self, parts: list[Part]) -> list[int]:
        """Encode a written conversation: each part by itself, as in training; a document begins with it."""
        tokenizer = self.run.tokenizer
        assert tokenizer is not None  # chats are text
        found: list[int] = []
        for part in parts:
            if part.special:
                found.append(self.run.specials[self._names[part.text]])
            else:
                found += tokenizer.encode([part.text])[0].tolist()
        beginning = tokenizer.end_of_text
        if not self.begins:
            return found
        return found if found[:1] == [beginning] else [beginning, *found]

    @property
    def ends(self) -> list[int]:
        """The ids that end an answer."""
        return [self.run.specials[self._names[text]] for text in sorted(self.template.ends)]

    def answer(
        self, messages: list[Message], *, tools: Any = None, **sampling: Any
    ) -> Iterator[str]:
        """Answer a conversation, piece by piece as it is drawn.

        Args:
            messages: the conversation, the last of which the model answers.
            tools: descriptions of tools.
            sampling: see :meth:`minillm_core.Run.stream`.

        Raises:
            Refusal: the template refuses the conversation.
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


@dataclass
class Talk:
    """A conversation that goes on.

    Attributes:
        model: who answers.
        sampling: how.
        messages: so far.
    """

    model: ChatModel
    sampling: dict[str, Any]
    messages: list[Message] = field(default_factory=list)

    def ask(self, content: str) -> Iterator[str]:
        """Put a question, and yield the answer piece by piece; what was yielded is remembered.

        Where the caller breaks off, the answer ends there.
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
    """Read the chat template of a model directory, as settings of the plugin ``sft``.

    Returns:
        The settings; none for a run, which has a template of its own, and without a template.

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
        shown: shows notes and progress.

    Raises:
        Refusal: it holds no run and no model.
    """
    if given := chat_of_directory(out):
        read = replace(read, plugins=",".join(filter(None, ["sft", read.plugins])))
    return read.open(out, shown, given or None)


def check_text(content: str, where: str) -> str:
    """Return what was typed.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            "what was typed is not UTF-8",
            where=f"{where}, at {error.start}",
            fix="save it as UTF-8",
        ) from error
    return content
