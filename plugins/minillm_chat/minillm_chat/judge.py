"""Evaluation of a chat model: the loss of reference answers, and the match of generated ones.

The loss is over all answers of the chats, in nats per token. Then the model generates the last answer of
each chat greedily, and a pattern selects the part of it to compare with the same part of the chat's own
answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minillm_chat.chats import conversation
from minillm_chat.sandbox import ChatRefusedError
from minillm_chat.talk import ChatModel, open_chat
from minillm_chat.templates import ASSISTANT
from minillm_core import DataError, Refusal, Run
from minillm_core.commands import InferenceOptions, counted, plain
from minillm_core.documents import Reading, find

__all__ = ["judge_chats", "judge_command", "part_of"]

LONGEST = 512
"""Default of the most tokens of an answer; the rest of a training row limits it too."""


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
    measured = run.evaluate(list(paths))
    right = formed = ended = count = cut = 0
    longest = max_tokens or LONGEST
    left_out: Counter[str] = Counter()
    with shown.phase("answering chats"):
        for messages, tools in _chats(paths, run.plan.config.model.vocab):
            if limit is not None and count == limit:
                break
            asked = _asked(model, messages, tools, wanted)
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
    left = [f"{counted(number, 'chat')} {why}" for why, number in sorted(left_out.items())]
    if not count:
        raise DataError(
            f"there is no chat to judge: {'; '.join(left) or 'the files are empty'}",
            where=", ".join(paths),
            fix="give chats whose last message is an answer that fits into a row, and a pattern that is "
            "in it",
        )
    for one in left:
        shown.say(f"note: left out: {one}")
    if cut:
        were = f"{counted(cut, 'answer')} {'was' if cut == 1 else 'were'}"
        shown.say(f"note: {were} cut after {counted(longest, 'token')}: --max-tokens allows more")
    return {
        "answer_loss": measured.val_loss,
        "exact_match": right / count,
        "format_rate": formed / count,
        "ended_rate": ended / count,
        "chats": count,
        "left_out": left_out.total(),
        "tokens": measured.tokens,
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


def _asked(
    model: ChatModel, messages: list[dict[str, Any]], tools: Any, pattern: re.Pattern[str] | None
) -> tuple[list[int], int, str] | str:
    """Prepare the last answer of a chat.

    Returns:
        The ids before it, the tokens for which a row has room, and the expected part; or why the chat is left out.
    """
    own = next((i for i in range(len(messages) - 1, 0, -1) if _answers(messages[i])), None)
    if own is None:
        return "without an answer"
    answer = messages[own]["content"].strip()
    if (expected := part_of(answer, pattern)) is None:
        return "whose own answer lacks the pattern"
    try:
        prompt = model.ids(model.template.prompt(messages[:own], tools=tools))
    except ChatRefusedError:
        return "that the template refuses"
    tokenizer, room = model.run.tokenizer, model.run.plan.config.train.seq_len - len(prompt)
    assert tokenizer is not None  # chats are text
    if room < len(tokenizer.encode([answer])[0]) + 1:  # with the token that ends it
        return "longer than a row (train.seq_len)"
    return prompt, room, expected


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
