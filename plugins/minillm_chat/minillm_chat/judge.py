"""The quality of a model's answers: their loss, and how answers that it generates compare.

The loss is that of all answers of the chats, in nats a token. Then the model gives the last answer of
each chat again, always by the likeliest token, and a pattern says which part of it is compared with the
part of the chat's own answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minillm_chat.chats import conversation
from minillm_chat.sandbox import ChatRefusedError
from minillm_chat.talk import ChatModel, open_chat
from minillm_chat.templates import ASSISTANT
from minillm_core import DataError, Refusal, Run
from minillm_core.commands import InferenceOptions, plain
from minillm_core.documents import Reading, find

__all__ = ["judge_chats", "judge_command", "part_of"]

LONGEST = 512
"""Tokens of an answer, at most; never more than a row of training has left."""


def judge_command(
    out: Path, read: InferenceOptions, shown: Any, paths: Sequence[str], **options: Any
) -> tuple[Run, dict[str, float]]:
    """Judge what ``minillm eval OUT --chats`` names, a run or a model directory.

    Args:
        out: the folder.
        read: how it is opened.
        shown: as for :func:`judge_chats`.
        paths: as there.
        options: as there.

    Returns:
        The run, and the figures.
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
) -> dict[str, float]:
    """Judge a run by chats.

    Args:
        run: trained by the plugin ``sft``.
        paths: files or folders of chats.
        shown: where progress and notes are shown (:func:`minillm_core.commands.display`).
        pattern: a regular expression; an answer's part is the first group of its last match, or the
            match. None: the whole answer, without spaces around it.
        limit: how many chats are answered; None: all.

    Returns:
        ``answer_loss`` (nats a token of all answers), ``exact_match`` (share of the given answers whose
        part is the chat's), ``format_rate`` (share in which the pattern is found; without a pattern,
        share that came to an end), ``ended_rate`` (share that came to an end of turn), ``chats``,
        ``left_out`` (without an answer, or whose own answer lacks the pattern) and ``tokens`` (of the
        loss).

    Raises:
        Refusal: the run was not trained on chats, or the pattern is none.
        DataError: the chats cannot be read, or none can be judged.
    """
    model, wanted = ChatModel.of(run), _compiled(pattern)
    measured = run.evaluate(list(paths))
    right = formed = ended = count = left_out = 0
    with shown.phase("answering chats"):
        for messages, tools in _chats(paths, run.plan.config.model.vocab):
            if limit is not None and count == limit:
                break
            own = next((i for i in range(len(messages) - 1, 0, -1) if _answers(messages[i])), None)
            expected = None if own is None else part_of(messages[own]["content"], wanted)
            if own is None or expected is None:
                left_out += 1
                continue
            said, came_to_an_end = _said(model, messages[:own], tools)
            if said is None:
                left_out += 1
                continue
            given = part_of(said, wanted)
            count += 1
            right += given == expected
            ended += came_to_an_end
            formed += given is not None if pattern is not None else came_to_an_end
    if not count:
        raise DataError(
            f"there is no chat to judge: {left_out:,} are without an answer, or theirs lacks the pattern",
            where=", ".join(paths),
            fix="give chats whose last message is an answer, and a pattern that is in it",
        )
    return {
        "answer_loss": measured.val_loss,
        "exact_match": right / count,
        "format_rate": formed / count,
        "ended_rate": ended / count,
        "chats": count,
        "left_out": left_out,
        "tokens": measured.tokens,
    }


def part_of(answer: str, pattern: re.Pattern[str] | None) -> str | None:
    """Take the part of an answer that is compared; None: the pattern is not in it."""
    if pattern is None:
        return answer.strip()
    *_, last = [None, *pattern.finditer(answer)]
    if last is None:
        return None
    return (last[1] if pattern.groups and last[1] is not None else last[0]).strip()


def _answers(message: dict[str, Any]) -> bool:
    return message["role"] == ASSISTANT and bool(message["content"].strip())


def _said(model: ChatModel, messages: list[dict[str, Any]], tools: Any) -> tuple[str | None, bool]:
    """Give an answer; None: the template refuses the conversation. Whether it came to an end."""
    try:
        prompt = model.ids(model.template.prompt(messages, tools=tools))
    except ChatRefusedError:
        return None, False
    room = max(model.run.plan.config.train.seq_len - len(prompt), 1)
    drawn = model.run.stream(prompt, ends=model.ends, max_tokens=min(room, LONGEST), temperature=0)
    return "".join(drawn), drawn.ended


def _chats(paths: Sequence[str], vocab: int) -> Iterator[tuple[list[dict[str, Any]], Any]]:
    reading = Reading(vocab)
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
            f"the pattern is no regular expression: {error}",
            where=f"--pattern {plain(str(pattern), 80)}",
            fix="like --pattern '#### (.+)'",
        ) from error
