"""Conversations in files: reads JSON objects of several kinds as messages for templates.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"prompt": "...", "completion": "..."}

A message may have ``tool_calls``, ``reasoning_content`` and ``weight``; an object ``tools``, and
``system``, the system message of a conversation that has none. Contents that are lists of parts are
joined where all are texts; arguments of calls given as a JSON string are parsed to objects, since
templates serialise them as JSON.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from typing import Any

from minillm_chat.sandbox import ChatRefusedError
from minillm_chat.templates import ChatTemplate
from minillm_core import DataError
from minillm_core.commands import few, plain
from minillm_core.documents import (
    END_OF_TEXT,
    MalformedError,
    Place,
    Reading,
    Segment,
    Source,
    Special,
    find,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
NAMES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
"""Role names in other formats -> ours."""

NO_ANSWER = "left out: lines without an answer"
_REASONS = 8  # kinds of refusals that are counted separately
_ALPACA = (
    '{"prompt": "\\n\\n".join(filter(None, (one["instruction"], one.get("input")))), '
    '"completion": one["output"]}'
)
"""An expression that converts a line of Alpaca to a prompt with a completion."""

_PAIR = {"chosen", "rejected"}
"""The keys of preference data: two answers, of which people or a model preferred the first."""

_LIKE = 'like {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


def segments(
    files: Sequence[Source],
    reading: Reading,
    *,
    source: str,
    specials: Sequence[tuple[str, str]],
    variables: str,
    day: str,
) -> Iterator[list[Segment]]:
    """Read conversations as documents with weights on the answers.

    Conversations without an answer, or rejected by the template, are skipped and counted by reason.

    Args:
        files: JSON lines or tables.
        reading: bounds, progress and notes.
        source: of the template.
        specials: its special tokens: text and name of each.
        variables: its variables beside the messages, as JSON.
        day: the date formatted by ``strftime_now``, ISO 8601.

    Raises:
        DataError: a file holds no records, no record has an answer, or the template is invalid.
    """
    names = {text: name for text, name in specials}
    made = ChatTemplate(source, tuple(names), json.loads(variables), date.fromisoformat(day))
    read, refused = 0, set[str]()
    for file in files:
        if file.format.records is None:
            raise _without_records(file)
        for place, _, record in file.format.records(file.path, file.packing, reading):
            try:
                messages, tools = conversation(record, place)
                parts = made.parts(messages, tools=tools)
            except MalformedError as error:
                reading.malformed(error)
                continue
            except ChatRefusedError as error:
                if len(refused) < _REASONS:
                    refused.add(error.reason)
                reason = error.reason if error.reason in refused else "and other reasons"
                reading.notes[f"left out: lines whose chat is refused, {plain(reason, 120)}"] += 1
                continue
            if not any(part.weight for part in parts):
                reading.notes[NO_ANSWER] += 1
                continue
            read += 1
            yield [
                Segment(
                    Special(names[part.text]) if part.special else part.text,
                    {"weights": part.weight},
                )
                for part in parts
            ]
    if files and not read:
        left = "; ".join(f"{note}: {count:,}" for note, count in sorted(reading.notes.items()))
        raise DataError(
            "there is no conversation with an answer to learn",
            where=plain(left, 400) or str(files[0].path),
            fix=f"give JSON lines, {_LIKE}",
        )


def question(
    content: str,
    *,
    source: str,
    specials: Sequence[tuple[str, str]],
    variables: str,
    day: str,
) -> list[Segment]:
    """Render a user's question, up to the start of its answer.

    Args:
        content: the question.
        source: as for :func:`segments`, like the rest.
        specials: as there.
        variables: as there.
        day: as there.
    """
    names = {text: name for text, name in specials}
    made = ChatTemplate(source, tuple(names), json.loads(variables), date.fromisoformat(day))
    parts = made.prompt([{"role": "user", "content": content}])
    return [Segment(Special(names[one.text]) if one.special else one.text) for one in parts]


def names_of(specials: Sequence[str]) -> dict[str, str]:
    """Map special tokens' texts to names: ``<|im_start|>`` -> ``im_start``."""
    found: dict[str, str] = {}
    for text in specials:
        name = "".join(one if one.isalnum() and one.isascii() else "_" for one in text).strip("_")
        name = name if name.isidentifier() else "special"
        while name in (*found.values(), "end_of_text"):
            name += "_"
        found[text] = "end_of_text" if text == END_OF_TEXT else name
    return found


def _first(record: Mapping[str, Any], *keys: str) -> Any:
    """Return the value of the first key that is there and not null, as in a table with both; else None."""
    return next((record[key] for key in keys if record.get(key) is not None), None)


def conversation(record: Mapping[str, Any], place: Place) -> tuple[list[dict[str, Any]], Any]:
    """Parse a record's messages and tools.

    Raises:
        MalformedError: the record holds no conversation, or an invalid message.
    """
    given, tools = _first(record, "messages", "conversations"), record.get("tools")
    prompt, answer = record.get("prompt"), _first(record, "completion", "response")
    if given is None and prompt is not None and (answer is not None or not record.keys() >= _PAIR):
        given = [*_turns(prompt, "user"), *_turns(answer, "assistant")]
    if not isinstance(given, list) or not given:
        what, fix = "a chat whose messages are not a list, or an empty one", _LIKE
        if given is None:
            what, fix = _unlike_a_chat(record, place)
        raise place.error(what, fix, reason="no conversation")
    if isinstance(tools, str):  # as tables keep them
        tools = _parsed(tools)
    if tools is not None and not isinstance(tools, list):
        raise place.error('"tools" is not a list', 'like [{"type": "function", "function": {...}}]')
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise place.error('"system" is not text', "quote it, or leave it out")
    try:
        json.dumps([system, given, tools], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        what, fix = "a text with a lone surrogate", "write the character whole, or drop it"
        raise place.error(what, fix) from error
    except TypeError as error:  # a table has dates and bytes
        raise place.error(f"{plain(str(error), 80)}", "write it as text") from error
    messages = [_message(one, number, place) for number, one in enumerate(given)]
    instructed = any(one["role"] in ("system", "developer") for one in messages)
    if system and system.strip() and not instructed:
        messages.insert(0, {"role": "system", "content": system})
    return messages, tools or None


def _turns(given: Any, role: str) -> list[Any]:
    """Convert a prompt or a completion, given as text or messages, to messages."""
    return given if isinstance(given, list) else [{"role": role, "content": given}]


def _message(given: Any, number: int, place: Place) -> dict[str, Any]:
    def wrong(what: str, fix: str) -> MalformedError:
        return place.error(f"message {number}: {what}", fix, reason=what)

    if not isinstance(given, Mapping):
        raise wrong("no object", _LIKE)
    made = {key: one for key, one in given.items() if one is not None}
    if "from" in made and "role" not in made:
        made["role"] = made.pop("from")
    if "value" in made and "content" not in made:
        made["content"] = made.pop("value")
    role = made.get("role")
    role = NAMES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise wrong(f"no role {plain(repr(role), 40)}", f"one of {', '.join(ROLES)}")
    content, calls = made.get("content", ""), made.get("tool_calls")
    if isinstance(content, list):
        if not all(
            isinstance(one, Mapping) and isinstance(one.get("text"), str) for one in content
        ):
            raise wrong("a content that is not text alone", "take images and sounds out")
        content = "".join(one["text"] for one in content)
    if not isinstance(content, str):
        raise wrong("a content that is not text", "quote it, or leave the line out")
    made |= {"role": role, "content": content}
    if calls is not None:
        if not isinstance(calls, list) or not all(isinstance(one, Mapping) for one in calls):
            raise wrong(
                '"tool_calls" that is not a list of objects', "name and arguments of each call"
            )
        made["tool_calls"] = [_call(one) for one in calls]
        if not calls:
            del made["tool_calls"]
    return made


def _without_records(file: Source) -> DataError:
    """Return the error for a file whose format has no objects; without --data, for what is read instead."""
    with suppress(DataError):  # a Python without the sources of its library
        if file in find((), lambda line: None):
            return DataError(
                "--task sft learns from chats, and no data are named",
                where="--data, without which the standard library of Python is read",
                fix=f"--data FILE: JSON lines, {_LIKE}",
            )
    return DataError(
        f"a {file.format.name} holds no conversations",
        where=str(file.path),
        fix=f"give JSON lines, {_LIKE}",
    )


def _unlike_a_chat(record: Mapping[str, Any], place: Place) -> tuple[str, str]:
    """Describe an object that holds no conversation, with its keys, and how to make it one."""
    has = few([repr(key[:40]) for key in record], 8) or "no key"
    what = 'an object without "messages", "conversations", or "prompt" with "completion"'
    fix = _LIKE
    if record.keys() >= _PAIR:
        what = 'preference data ("chosen" and "rejected"), where a chat has one answer'
        if _holds_question(record["chosen"]):
            fix = 'write "chosen" as "messages"' + _conversion('{"messages": one["chosen"]}', place)
        elif record.get("prompt") is not None:
            made = '{"prompt": one["prompt"], "completion": one["chosen"]}'
            fix = 'write "chosen" as "completion", beside "prompt"' + _conversion(made, place)
        else:
            fix = f'write "chosen" as a chat, {_LIKE}'
    elif {"instruction", "output"} <= record.keys():
        fix = 'write instruction and input (Alpaca) as "prompt", output as "completion"'
        fix += _conversion(_ALPACA, place)
    return f"{what}: it has {has}", fix


def _holds_question(given: Any) -> bool:
    """Return whether an answer is a list of messages that begins before the answer."""
    first = given[0] if isinstance(given, list) and given else None
    if not isinstance(first, Mapping):
        return False
    role = _first(first, "role", "from")
    return NAMES.get(role, role) != "assistant"


def _conversion(expression: str, place: Place) -> str:
    """Return the end of a fix, with the command that converts lines; empty if the file has no plain lines.

    Args:
        expression: Python, from an object ``one`` to the object to write.
        place: of a line.
    """
    if place.path.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        return ""
    program = (
        f"import json; [print(json.dumps({expression})) for one in "
        'map(json.loads, filter(str.strip, open(0, encoding="utf-8-sig")))]'
    )
    read, made = (
        shlex.quote(str(one)) for one in (place.path, place.path.with_suffix(".chats.jsonl"))
    )
    return f", then train on {made}: python3 -c {shlex.quote(program)} < {read} > {made}"


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the arguments of a call, if they are a JSON string."""
    made = dict(given)
    if isinstance(function := made.get("function"), Mapping):
        made["function"] = _call(function)
    elif isinstance(text := made.get("arguments"), str) and isinstance(_parsed(text), dict):
        made["arguments"] = _parsed(text)
    return made


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
