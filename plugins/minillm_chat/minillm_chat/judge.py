"""Evaluation of a chat model: the loss of reference answers, and the match of generated ones.

The loss is over all answers of the chats, in nats per token, each chat read alone from its beginning. The
model also generates the last answer of each chat greedily, and a pattern selects the part of it to compare
with the same part of the chat's own answer, as the template writes it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from minillm_chat.chats import conversation
from minillm_chat.sandbox import ChatRefusedError
from minillm_chat.talk import ChatModel, open_chat
from minillm_chat.templates import ASSISTANT, Part
from minillm_core import DataError, Refusal, Run
from minillm_core.commands import InferenceOptions, counted, plain
from minillm_core.documents import Reading, find

__all__ = ["judge_chats", "judge_command", "part_of"]

LONGEST = 512
"""Default of the most tokens of an answer; the rest of a training row limits it too."""

_REASONS = 8  # reasons for leaving a chat out that are counted separately


def judge_command(
    out: Path, read: InferenceOptions, shown: Any, paths: Sequence[str], **options: Any
) -> tuple[Run, dict[str, float]]:
    """Evaluate the run or model directory of ``minillm eval OUT --chats``.

    Args:
        out: the folder.
        read: options of opening it.
        shown: as for :func:`judge_chats`.
        paths: as there.
        options: as there.

    Returns:
        The run, and the metrics.
    """
    run = open_chat(out, read, shown)
    return run, judge_chats(run, paths, shown, **options)


def judge_chats(
    run: Run,
    paths: Sequence[str],
    shown: Any,
    *,
    pattern: str | None = None,
    limit: int | None = None,
    max_tokens: int | None = None,
) -> dict[str, float]:
    """Evaluate a run on chats.

    Args:
        run: trained by the plugin ``sft``.
        paths: files or folders of chats.
        shown: the display of progress and notes (:func:`minillm_core.commands.display`).
        pattern: a regular expression; the compared part is the first group of its last match, or the
            match. None: the whole answer, stripped.
        limit: number of chats to answer; None: all.
        max_tokens: most tokens of a generated answer, which ends at the end of a row too; None: ``LONGEST``.
            A note counts the answers that are cut there.

    Returns:
        ``answer_loss`` (nats per token over all answers), ``exact_match`` (share of generated answers
        whose part equals the chat's), ``format_rate`` (share with a match of the pattern; without a
        pattern, ``ended_rate``), ``ended_rate`` (share that reach an end of turn), ``chats``,
        ``left_out`` (chats without an answer, whose own answer lacks the pattern, that the template
        refuses, or whose prompt and own answer are longer than a training row; a note counts each
        reason) and ``tokens`` (counted in the loss).

    Raises:
        Refusal: the run was not trained on chats, or the pattern is invalid.
        DataError: the chats cannot be read, or none can be evaluated.
    """
    model, wanted = ChatModel.of(run), _compiled(pattern)
    vocab = run.plan.config.model.vocab
    loss, reading, refused = _AnswerLoss(model), Reading(vocab), dict[int, str]()
    with shown.phase("measuring answers"):  # first: a line that cannot be read is found here
        for number, (messages, tools) in enumerate(_chats(paths, reading)):
            try:
                loss.add(model.template.parts(messages, tools=tools))
            except ChatRefusedError as error:
                refused[number] = error.reason
        nats, tokens = loss.total()
    right = formed = ended = count = cut = 0
    longest = max_tokens or LONGEST
    left_out: Counter[str] = Counter()
    with shown.phase("answering chats"):
        for number, (messages, tools) in enumerate(_chats(paths, Reading(vocab))):
            if count == limit:
                break
            if number in refused:
                continue
            try:
                asked = _asked(model, messages, tools, wanted)
            except ChatRefusedError as error:  # up to the answer; the whole chat is not
                refused[number] = error.reason
                continue
            if isinstance(asked, str):
                left_out[asked] += 1
                continue
            prompt, room, expected = asked
            most = min(room, longest)
            drawn = run.stream(prompt, ends=model.ends, max_tokens=most, temperature=0)
            given, came_to_an_end = part_of("".join(drawn), wanted), drawn.ended
            count += 1
            right += given == expected
            ended += came_to_an_end
            cut += not came_to_an_end and longest < room
            formed += given is not None if pattern is not None else came_to_an_end
    for reason, number in Counter(refused.values()).most_common():
        shown_as = plain(reason, 120) if len(left_out) < _REASONS else "for other reasons"
        left_out[f"that the template refuses, {shown_as}"] += number
    left = [f"{counted(number, 'chat')} {why}" for why, number in sorted(left_out.items())]
    if not count or not tokens:
        why = "; ".join(left) or ("every answer has weight 0" if count else "the files are empty")
        raise DataError(
            f"there is no chat to judge: {why}",
            where=", ".join(paths),
            fix="give chats whose last message is an answer that fits into a row, and a pattern that is "
            "in it",
        )
    notes = [f"{note}: {number:,}" for note, number in sorted(reading.notes.items())]
    for one in (*notes, *(f"left out: {one}" for one in left)):
        shown.say(f"note: {one}")
    if cut:
        were = f"{counted(cut, 'answer')} {'was' if cut == 1 else 'were'}"
        shown.say(f"note: {were} cut after {counted(longest, 'token')}: --max-tokens allows more")
    return {
        "answer_loss": nats / tokens,
        "exact_match": right / count,
        "format_rate": formed / count,
        "ended_rate": ended / count,
        "chats": count,
        "left_out": left_out.total(),
        "tokens": tokens,
    }


def part_of(answer: str, pattern: re.Pattern[str] | None) -> str | None:
    """Extract the part of an answer to compare; None: the pattern does not match."""
    if pattern is None:
        return answer.strip()
    *_, last = [None, *pattern.finditer(answer)]
    if last is None:
        return None
    return (last[1] if pattern.groups and last[1] is not None else last[0]).strip()


def _answers(message: dict[str, Any]) -> bool:
    return message["role"] == ASSISTANT and bool(message["content"].strip())


class _AnswerLoss:
    """A sum of the losses of the answers' tokens, of one chat after another.

    Chats are not laid end to end, as the text of ``Run.evaluate`` is: an answer would lose its question
    wherever a row ends.
    """

    def __init__(self, model: ChatModel) -> None:
        config = model.run.plan.config.train
        self._model, self._rows, self._seq_len = model, config.rows, config.seq_len
        self._held: list[tuple[list[int], np.ndarray]] = []  # ids, and whether each is learnt
        self._nats, self._tokens = 0.0, 0

    def add(self, parts: Sequence[Part]) -> None:
        """Add a chat; one longer than a row is cut into rows that overlap by a token."""
        encoded = [self._model.encoded(part) for part in parts]
        ids = self._model.begun([*chain.from_iterable(encoded)])
        learnt = np.repeat([part.weight > 0 for part in parts], [*map(len, encoded)])
        learnt = np.concatenate([np.zeros(len(ids) - len(learnt), bool), learnt])
        for first in range(0, len(ids) - 1, self._seq_len):
            here = slice(first, first + self._seq_len + 1)
            if learnt[here][1:].any():
                self._held.append((ids[here], learnt[here][1:]))
            if len(self._held) == self._rows:
                self._measure()

    def total(self) -> tuple[float, int]:
        """Return the nats of all answers, and their number of tokens."""
        if self._held:
            self._measure()
        return self._nats, self._tokens

    def _measure(self) -> None:
        lost = self._model.run.losses([ids for ids, _ in self._held])
        for nats, (_, learnt) in zip(lost, self._held, strict=True):
            self._nats += float(nats[learnt].sum(dtype=np.float64))
            self._tokens += int(learnt.sum())
        self._held.clear()


def _asked(
    model: ChatModel, messages: list[dict[str, Any]], tools: Any, pattern: re.Pattern[str] | None
) -> tuple[list[int], int, str] | str:
    """Prepare the last answer of a chat.

    Returns:
        The ids before it, the tokens for which a row has room, and the expected part; or why the chat is left out.

    Raises:
        ChatRefusedError: the template rejects the chat up to that answer.
    """
    own = next((i for i in range(len(messages) - 1, 0, -1) if _answers(messages[i])), None)
    if own is None:
        return "without an answer"
    prompt = model.ids(model.template.prompt(messages[:own], tools=tools))
    turns = [
        {**one, "weight": int(number == own)} for number, one in enumerate(messages[: own + 1])
    ]
    answer = [part for part in model.template.parts(turns, tools=tools) if part.weight]
    written = "".join(part.text for part in answer if not part.special)  # as a text is generated
    if (expected := part_of(written, pattern)) is None:
        return "whose own answer lacks the pattern"
    room = model.run.plan.config.train.seq_len - len(prompt)
    if room < sum(len(model.encoded(part)) for part in answer):
        return "longer than a row (train.seq_len)"
    return prompt, room, expected


def _chats(paths: Sequence[str], reading: Reading) -> Iterator[tuple[list[dict[str, Any]], Any]]:
    for file in find(paths, lambda line: None):
        if file.format.records is None:
            raise DataError(
                f"a {file.format.name} holds no conversations",
                where=str(file.path),
                fix="give JSON lines of chats",
            )
        for place, _, record in file.format.records(file.path, file.packing, reading):
            yield conversation(record, place)


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise Refusal(
            f"the pattern is not a regular expression: {error}",
            where=f"--pattern {plain(str(pattern), 80)}",
            fix="like --pattern '#### (.+)'",
        ) from error
