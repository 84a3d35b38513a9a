"""Chat templates: render a conversation as text, and find its supervised spans, the answers.

A template renders a whole conversation without marking who wrote what. Answers are found by
*incremental prefix rendering*: ``messages[:i]`` with a generation prompt is rendered, then
``messages[:i + 1]``, where message i is an answer; the added text is the span. Templates that drop the
reasoning of earlier turns, or end the last turn differently, render a short conversation as no prefix of
a longer one; there each answer is located in the whole, by rendering the conversation again with a marker
in place of each of its texts. A conversation whose answers neither method locates exactly is refused.

Special tokens spelled out in a message are text: markers distinguish them from the template's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

from minillm_chat.sandbox import ChatRefusedError, Sandbox
from minillm_core import DataError
from minillm_core.commands import plain
from minillm_core.documents import END_OF_TEXT

Message = Mapping[str, Any]
Chat = Sequence[Message]

ASSISTANT = "assistant"

CHATML = """\
{%- set turns = messages %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}
{%- set turns = messages[1:] %}
{%- endif %}
{{- 'Tools:' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in turns %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function or call %}
{{- '\\n<tool_call>\\n' + ({'name': call.name, 'arguments': call.arguments} | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""ChatML: turns between special tokens; reasoning and tool calls in the format of Qwen's templates."""

PLAIN = """\
{%- for tool in tools or [] %}{{ 'Tool: ' + (tool | tojson) + '\\n\\n' }}{% endfor %}
{%- for message in messages %}
{{- message.role | capitalize + ': ' + (message.content or '') | trim }}
{%- for call in message.tool_calls or [] %}{{ '\\nCall: ' + ((call.function or call) | tojson) }}{% endfor %}
{{- eos_token if message.role == 'assistant' }}{{ '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""
"""Plain text, for a tokenizer whose only special token is its end of text."""

BUILT_IN: Mapping[str, str] = {"chatml": CHATML, "plain": PLAIN}
"""Name -> template source."""

_TEMPLATES = (
    f"{', '.join(BUILT_IN)}, or a file with a chat template: @FILE of Jinja, or of a model's folder "
    "@FOLDER/tokenizer_config.json that has chat_template"
)
"""What can be given as a template."""

_FORMS = re.compile(r"<\|[^<>|\s]+\|>|<(?:start|end)_of_\w+>")
"""Special tokens recognised in a template that has no list of them."""

_OBJECT = re.compile(r'\s*\{\s*["}]')
"""The beginning of a JSON object; Jinja begins with ``{{``, ``{%``, ``{#`` or text."""

_SAID = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")
"""Fields of a message with the assistant's output."""

_MARKS = range(0xF0000, 0xFFFFE)  # private-use code points, absent from ordinary text


class Part(NamedTuple):
    """A part of a rendered conversation: a text or a special token, and its weight in the loss."""

    text: str
    special: bool
    weight: float


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, with its special tokens.

    Attributes:
        source: Jinja.
        specials: texts of its special tokens; all other output is text.
        variables: template variables besides the messages: bos_token, eos_token, enable_thinking, ...
        today: the date formatted by strftime_now; None: the current date.
    """

    source: str
    specials: tuple[str, ...]
    variables: Mapping[str, Any] = field(default_factory=dict)
    today: date | None = None

    @classmethod
    def of(
        cls,
        given: str,
        *,
        specials: Sequence[str] = (),
        arguments: Mapping[str, Any] | None = None,
        today: date | None = None,
    ) -> ChatTemplate:
        """Read a template, and check that answers can be found in its output.

        Args:
            given: a name of :data:`BUILT_IN`, the source of a template, or a tokenizer_config.json
                that has one.
            specials: texts of its special tokens; default: those of the tokenizer_config.json that its
                source contains, or else the forms ``<|...|>``, ``<start_of_...>``, ``<end_of_...>``.
            arguments: further variables.
            today: see the class.

        Raises:
            DataError: not a template, refused by the sandbox, or without locatable answers.
        """
        source, tokens, variables = _read(given)
        variables = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, **variables}
        variables |= arguments or {}
        for name in arguments or {}:
            if name not in source:
                raise _without_effect(f"argument {name!r}")
        written = (
            {text for text in tokens if text in source} if tokens else set(_FORMS.findall(source))
        )
        written |= {str(variables[name]) for name in ("bos_token", "eos_token") if name in source}
        if short := sorted(text for text in {*specials} or written if len(text) < 2):
            raise _unfit(f"{short[0]!r} cannot be told from text as a special token")
        made = cls(source, tuple(sorted({*specials} or written)), variables, today)
        for text in specials:
            if text not in made._probe:
                raise _without_effect(f"special token {text!r}")
        made.check()
        return made

    def check(self) -> None:
        """Check that a template has a generation prompt and ends answers with a special token.

        Raises:
            DataError: it does not, or is refused by the sandbox.
        """
        question, answer = {"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}
        try:
            plain, asked = self.render([question]), self.render([question], prompt=True)
            answered = self.render([question, answer])
            if not answered.startswith(asked):
                raise _unfit(
                    "the generation prompt is not how the template begins an answer",
                    f"{asked[-60:]!r}, and {answered[-60:]!r}",
                )
            if asked == plain and not answered.removeprefix(asked).lstrip().startswith("b"):
                raise _unfit("the template has no generation prompt", f"{answered[-60:]!r}")
            self.answers([question, answer])
        except ChatRefusedError as error:
            raise _unfit(
                f"the template cannot write a question with its answer: {error.reason}"
            ) from error

    @cached_property
    def exported(self) -> str:
        """The source with its variables set, rendering the token that begins every document first.

        That is the written tokenizer's ``bos_token``, rendered before a variable sets another. A template
        that begins with it is left alone.
        """
        usual = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
        given = [
            f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} %}}\n"
            for name, value in sorted(self.variables.items())
            if usual.get(name) != value
        ]
        own = self._special.match(self.render([{"role": "user", "content": "a"}]))
        if own is None:
            first = "{{- bos_token }}"
        elif own[0] == END_OF_TEXT:
            first = ""
        else:
            text = json.dumps(own[0], ensure_ascii=False)
            first = f"{{{{- bos_token if bos_token != {text} }}}}"
        return first + "".join(given) + self.source

    def render(self, messages: Chat, *, tools: Any = None, prompt: bool = False) -> str:
        """Render a conversation.

        Args:
            messages: the conversation.
            tools: tool descriptions, as JSON.
            prompt: add the generation prompt.

        Raises:
            ChatRefusedError: the template rejects the conversation.
            DataError: the sandbox refuses the template.
        """
        given = {"tools": tools, "documents": None, **self.variables}
        return self._sandbox.render(
            given | {"messages": list(messages), "add_generation_prompt": prompt}
        )

    def parts(self, messages: Chat, *, tools: Any = None) -> list[Part]:
        """Render a conversation as parts, with loss weights on the answers.

        Joined, the texts of the parts equal the output of :meth:`render`. An answer's weight is its
        message's ``weight``, 1 by default; a message without text has 0. The supervised span ends with
        the end of turn, up to its special token.

        Raises:
            ChatRefusedError: the template rejects it, or an answer cannot be located in it.
            DataError: the sandbox refuses the template.
        """
        written = _Written(self, messages, tools)
        found: list[Part] = []
        place = 0
        for start, end, weight in self._answers(written):
            found += written.split(place, start, 0.0)
            found += written.split(start, end, weight)
            place = end
        found += written.split(place, len(written.whole), 0.0)
        return found

    def prompt(self, messages: Chat, *, tools: Any = None) -> list[Part]:
        """Render a conversation with the generation prompt, as parts of weight 0.

        Raises:
            ChatRefusedError: the template rejects it.
        """
        written = _Written(self, messages, tools, prompt=True)
        return written.split(0, len(written.whole), 0.0)

    def answers(self, messages: Chat, *, tools: Any = None) -> list[str]:
        """Return the supervised span of each answer, including its end of turn."""
        written = _Written(self, messages, tools)
        return [written.plain(written.whole[a:b]) for a, b, _ in self._answers(written)]

    @cached_property
    def ends(self) -> frozenset[str]:
        """The special tokens that end an answer, at the end of a conversation or before further turns."""
        turns: list[Message] = [
            {"role": "user", "content": "a"},
            {"role": ASSISTANT, "content": "b"},
        ]
        thought = {"role": ASSISTANT, "content": "b", "reasoning_content": "c", "thinking": "c"}
        last = self._special.findall(self.answers(turns)[-1])[-1]
        try:
            earlier = self._special.findall(self.answers([*turns, *turns])[0])[-1]
            inside = self._special.findall(self.answers([turns[0], thought])[-1])[:-1]
        except ChatRefusedError:
            return frozenset({last})
        return frozenset({last} | ({earlier} - {*inside}))

    def _answers(self, written: _Written) -> Iterator[tuple[int, int, float]]:
        last = 0
        for index, message in enumerate(written.messages):
            said = [(path[0], text) for path, text in _texts(message) if path[0] in _SAID]
            if message.get("role") != ASSISTANT or not said:
                continue
            start, end = written.answer(index)
            if start < last:
                raise ChatRefusedError("the template writes two answers over each other")
            ended = list(self._special.finditer(written.whole, start, end))
            if not ended or written.whole[ended[-1].end() : end].strip():
                raise ChatRefusedError("no special token ends the answer")
            last, answer = ended[-1].end(), written.whole[start : ended[-1].start()]
            calls = [text for field, text in said if field == "tool_calls" and text]
            if calls and not any(text in answer for text in calls):
                raise ChatRefusedError("the template leaves out the tool_calls of an answer")
            if not answer.strip():  # it would teach to say nothing
                raise ChatRefusedError(f"the template leaves out an answer, its {said[0][0]}")
            weight = message.get("weight", 1)
            if (
                isinstance(weight, bool)
                or not isinstance(weight, int | float)
                or not 0 <= weight < 1e6
            ):
                raise ChatRefusedError('"weight" of a message is not a number from 0')
            yield start, last, float(weight)

    @cached_property
    def _probe(self) -> str:
        """The source, and renderings of turns of every role: a template may assemble tokens from pieces."""
        found, pair = [self.source], ("user", ASSISTANT)
        for roles in (pair, ("system", *pair), ("developer", *pair), (*pair, "tool")):
            with suppress(ChatRefusedError):
                turns = [{"role": role, "content": "a"} for role in roles]
                found += [self.render(turns), self.render(turns, prompt=True)]
        return "\n".join(found)

    @cached_property
    def _sandbox(self) -> Sandbox:
        return Sandbox(self.source, self.today)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        longest_first = sorted(self.specials, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class _Written:
    """A conversation rendered by a template, in which answers are located.

    Attributes:
        messages: the messages, with a marker inside each special token spelled out in them.
        whole: the rendering of all messages, markers included.
    """

    def __init__(self, template: ChatTemplate, messages: Chat, tools: Any, prompt: bool = False):
        self.template, self.tools = template, tools
        known = json.dumps([messages, tools], ensure_ascii=False)
        unused = (chr(code) for code in _MARKS if chr(code) not in known)
        self._mark, self._place = islice(unused, 2)
        self.messages = [self._marked(message) for message in messages]
        self.tools = self._marked(tools)
        self.whole = self._render(self.messages, prompt)
        if self._mark in self.whole:
            plain = template.render(messages, tools=tools, prompt=prompt)
            if self.plain(self.whole) != plain:
                raise ChatRefusedError(
                    "a special token that is written out in a message changes the rest"
                )

    def plain(self, text: str) -> str:
        """Remove the markers from a text."""
        return text.replace(self._mark, "")

    def split(self, start: int, end: int, weight: float) -> list[Part]:
        """Split a span of the whole at special tokens."""
        found, place = [], start
        for match in self.template._special.finditer(self.whole, start, end):
            if place < match.start():
                found.append(Part(self.plain(self.whole[place : match.start()]), False, weight))
            found.append(Part(match[0], True, weight))
            place = match.end()
        if place < end:
            found.append(Part(self.plain(self.whole[place:end]), False, weight))
        return found

    def answer(self, index: int) -> tuple[int, int]:
        """Locate the supervised span of message ``index``: its start and end in the whole.

        Raises:
            ChatRefusedError: it cannot be located exactly.
        """
        asked = self._render(self.messages[:index], True)
        answered = self._render(self.messages[: index + 1])
        if self.whole.startswith(answered) and answered.startswith(asked):
            return len(asked), len(answered)
        end = self._end(index, answered)
        if self.whole.startswith(asked):
            return len(asked), end
        return self._start(index, asked), end

    def _start(self, index: int, asked: str) -> int:
        """Find the start of an answer whose prompt, rendered alone, is not a prefix of the whole."""
        first = self._first(index, min)
        if first is None:
            raise ChatRefusedError("the template leaves out a message")
        # search from the last text of the nearest earlier message: that message's opening is before it
        earlier = (self._first(one, max) for one in range(index - 1, -1, -1))
        earliest = next((one for one in earlier if one is not None), 0)
        opening = asked.removeprefix(self._render(self.messages[:index]))
        if index and not opening:  # the answer begins where the message before it ends
            return self._end(index - 1, asked)
        if opening and opening != asked:
            # for earlier turns a template may render only the beginning of the generation prompt,
            # without the empty reasoning at its end
            special = self.template._special.search(opening)
            shortest = special.end() if special else len(opening)
            for length in range(len(opening), shortest - 1, -1):
                if length < len(opening) and not opening[:length].endswith(("\n", " ")):
                    continue
                at = self.whole.rfind(opening[:length], earliest, first)
                if at >= 0:
                    return at + length
        raise ChatRefusedError("the template rewrites what comes before an answer")

    def _first(self, index: int, which: Callable[[Iterable[int]], int]) -> int | None:
        """Find the start of a message's first (``min``) or last (``max``) text in the whole; None: it has none."""
        before = [one for one, _ in self._around(index, self.messages).values()]
        if not all(map(self.whole.startswith, before)):
            raise ChatRefusedError("the template's text before a message depends on that message")
        return which(map(len, before)) if before else None

    def _end(self, index: int, answered: str) -> int:
        """Find the end of an answer that is rendered differently when more turns follow."""
        special = self.template._special
        here = self._around(index, self.messages)
        alone = self._around(index, self.messages[: index + 1])
        if not here:
            raise ChatRefusedError("the template leaves out a message")
        for path in here.keys() & alone.keys():
            (before, after), (before_alone, tail) = here[path], alone[path]
            if not (_frames(before, after, self.whole) and _frames(before_alone, tail, answered)):
                continue
            end = len(self.whole) - len(after)
            if after.startswith(tail):
                return end + len(tail)
            ends, ends_alone = special.match(after), special.match(tail)
            if ends and ends_alone:
                return end + ends.end()
        raise ChatRefusedError("the template ends an answer otherwise when more follows")

    def _around(self, index: int, messages: Chat) -> dict[tuple[Any, ...], tuple[str, str]]:
        """Render a conversation once per text of a message, with a marker in the text's place.

        Returns:
            Path of each rendered text -> the output before and after the marker; where the template
            repeats the text, such as a tool's name beside its result, the repetition is restored.
        """
        found = {}
        for path, text in _texts(messages[index]):
            other = [*messages]
            other[index] = _with(messages[index], path, self._place)
            before, mark, after = self._render(other).partition(self._place)
            if mark:
                found[path] = before, after.replace(self._place, text)
        return found

    def _render(self, messages: Chat, prompt: bool = False) -> str:
        return self.template.render(messages, tools=self.tools, prompt=prompt)

    def _marked(self, value: Any) -> Any:
        """Insert a marker into each special token spelled out in a message."""
        if isinstance(value, str):
            return self.template._special.sub(
                lambda one: one[0][0] + self._mark + one[0][1:], value
            )
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(one) for key, one in value.items()}
        return [self._marked(one) for one in value] if isinstance(value, list) else value


def _frames(before: str, after: str, text: str) -> bool:
    """Return whether a text begins with ``before`` and ends with ``after``, without overlap."""
    fits = len(before) + len(after) <= len(text)
    return fits and text.startswith(before) and text.endswith(after)


def _texts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield path and value of each text in a message, except names that templates branch on.

    Empty texts are included only inside calls: templates render a message without content differently.
    """
    if isinstance(value, str) and (value.strip() or len(path) > 1):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            if key not in ("role", "type", "id"):
                yield from _texts(one, (*path, key))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _texts(one, (*path, number))


def _with(value: Any, path: tuple[Any, ...], text: str) -> Any:
    """Copy a message with the text at ``path`` replaced."""
    if not path:
        return text
    copy = dict(value) if isinstance(value, Mapping) else list(value)
    copy[path[0]] = _with(value[path[0]], path[1:], text)
    return copy


def check_name(given: str) -> None:
    """Check that a template given without any Jinja or JSON, as a name, is built in.

    Raises:
        DataError: it is not.
    """
    if given not in BUILT_IN and "{" not in given:
        raise DataError(
            f"there is no chat template of the name {given[:60]!r}",
            where=f"sft.template={plain(given, 60)}",
            fix=_TEMPLATES,
            line="",  # else the core adds this line of the plugin, if nothing is wrong
        )


def _read(given: str) -> tuple[str, list[str], dict[str, str]]:
    """Read a template's source, the special tokens listed with it, and its variables."""
    if given in BUILT_IN:
        return BUILT_IN[given], [], {}
    check_name(given)
    if not _OBJECT.match(given) and "{" in given:
        return given, [], {}
    try:
        config = json.loads(given)
        source = config["chat_template"]
        if isinstance(source, list):  # several by name
            source = {one["name"]: one["template"] for one in source}["default"]
        tokens = [
            one["content"]
            for one in config.get("added_tokens_decoder", {}).values()
            if one.get("special")
        ]
        variables = {
            name: one if isinstance(one, str) else one["content"]
            for name in ("bos_token", "eos_token")
            if (one := config.get(name)) is not None
        }
        if not (
            isinstance(source, str)
            and all(isinstance(one, str) for one in [*tokens, *variables.values()])
        ):
            raise TypeError("texts")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"there is no chat template in {given[:60]!r}",
            where="the chat template",
            fix=_TEMPLATES,
        ) from error
    return source, tokens, variables


def _without_effect(what: str) -> DataError:
    return DataError(
        f"the chat template does not know the {what}, which would have no effect",
        where="the chat template",
        fix="leave it out, or write it as the template does",
    )


def _unfit(what: str, where: str = "") -> DataError:
    return DataError(
        what,
        where=f"the chat template{': ' if where else ''}{where}",
        fix="end answers with a special token, write {% if add_generation_prompt %}, and name special "
        "tokens of another form than <|...|>",
    )
