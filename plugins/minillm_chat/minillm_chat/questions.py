"""Questions of held-out chats, and the ids up to their answers, as encoded by a plugin's source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minillm_core.documents import Segment, Special, Tokenizer

__all__ = ["Questions"]

WEIGHTS = "weights"  # the column of documents with the weight of each token

_LOOKED_AT = 64  # maximum documents to search for questions
_LONGEST = 400  # maximum characters of a question


@dataclass(frozen=True)
class Questions:
    """An encoder of user questions into the ids up to the answer."""

    asked: Any  # the plan's ``sourcing``, with a prompt
    tokenizer: Tokenizer
    specials: Mapping[str, int]

    @property
    def ends(self) -> list[int]:
        """The ids that end an answer."""
        return [self.specials[name] for name in self.asked.ends or ()]

    def ids(self, question: str) -> list[int]:
        """Encode a question up to the start of its answer, each segment separately as in training."""
        found = [one for part in self._segments(question) for one in self._encoded(part.content)]
        start = self.tokenizer.end_of_text
        return found if found[:1] == [start] else [start, *found]

    def held_out(self, documents: Any, count: int) -> list[str]:
        """Find up to ``count`` questions in documents, between the texts that the template puts around one."""
        mark, found = "\U000f0000", list[str]()
        written = "".join(self._text(part.content) for part in self._segments(mark))
        before, _, after = written.partition(mark)
        for index in range(min(len(documents), _LOOKED_AT)):
            if len(found) == count:
                break
            question = self._first(documents, index, before, after)
            if question and question not in found:
                found.append(question)
        return found

    def _first(self, documents: Any, index: int, before: str, after: str) -> str | None:
        """Return the question before a document's first answer; None: no single question, or too long."""
        tokens = int(documents.lengths[index])
        columns = documents.room(tokens)
        documents.read(int(documents.offsets[index]), columns, np.zeros(tokens, bool))
        learnt = np.flatnonzero(columns.get(WEIGHTS, np.zeros(tokens)))
        text = self.tokenizer.decode(
            columns["ids"][: learnt[0] if learnt.size else 0].tolist(), specials=True
        )
        start = text.rfind(before) + len(before) if before in text else -1
        if start < 0 or not text.endswith(after) or len(text) - len(after) < start:
            return None
        question = text[start : len(text) - len(after)].strip()
        return question if 0 < len(question) <= _LONGEST else None

    def _segments(self, question: str) -> Sequence[Segment]:
        assert self.asked.prompt is not None
        return list(self.asked.prompt.call(question))

    def _encoded(self, content: Any) -> Sequence[int]:
        if isinstance(content, Special):
            return [self.specials[content.name]]
        return self.tokenizer.encode([content])[0].tolist() if isinstance(content, str) else content

    def _text(self, content: Any) -> str:
        return (
            content
            if isinstance(content, str)
            else self.tokenizer.decode(self._encoded(content), specials=True)
        )
