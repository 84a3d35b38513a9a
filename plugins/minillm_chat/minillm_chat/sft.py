"""Supervised fine-tuning on chats: a model learns to write the answers of conversations.

A chat template renders each conversation as one document; only its answers and their ends of turn have
labels. The template's special tokens are special tokens of the tokenizer: one that is trained for the
run reserves them; a given one has them, or gets them in unused rows of the embedding. For a tokenizer
without such rows there is the template ``plain``, which renders text alone.
"""

from __future__ import annotations

import json
from datetime import date

from pydantic import field_validator

from minillm_chat.chats import names_of, question, segments
from minillm_chat.templates import ChatTemplate, check_name
from minillm_core import Plugin, option

__all__ = ["Sft"]


EPOCHS = 2.0
"""Default number of epochs over the chats: more make a good model worse."""


class Sft(Plugin, api=1, task=True):
    """Trains on the answers of chats: JSON lines of messages, written by a chat template."""

    template: str = option(
        "chatml",
        help="chat template: chatml, plain (text without new special tokens), or @FILE of Jinja or "
        "of a tokenizer_config.json that contains one",
    )
    tokens: list[str] = option(
        [],
        help="special tokens in the template's output; default: those that look like special "
        "tokens",
    )
    arguments: dict[str, bool | str] = option(
        {},
        help="further variables of the template beside the messages, such as {enable_thinking = "
        "false}",
    )
    day: str = option("2026-01-01", help="date that templates insert as today's")
    add: bool = option(
        True, help="add the template's special tokens to a given tokenizer that lacks them"
    )

    @field_validator("template")
    @classmethod
    def _is_a_template(cls, template: str) -> str:
        check_name(template)
        return template

    @field_validator("day")
    @classmethod
    def _is_a_day(cls, day: str) -> str:
        date.fromisoformat(day)
        return day

    def build_data(self, data):
        made = self.written_by
        specials = names_of(made.specials)
        data.source(
            segments,
            fields={"weights": "float32"},
            chat_template=made.exported,
            chat_ends=[specials[text] for text in sorted(made.ends)],
            chat_prompt=question,
            epochs=EPOCHS,
            source=made.source,
            specials=[*specials.items()],
            variables=json.dumps(made.variables, sort_keys=True),
            day=self.day,
        )
        for text, name in specials.items():
            if name != "end_of_text":
                data.special(name, text, add=self.add, instead="sft.template=plain")

    @property
    def written_by(self) -> ChatTemplate:
        """The template, read and checked."""
        return ChatTemplate.of(
            self.template,
            specials=self.tokens,
            arguments=self.arguments,
            today=date.fromisoformat(self.day),
        )
