"""Chat templates: how a conversation becomes text, and which of it the assistant writes.

A template writes a whole conversation and says nothing of who wrote what. Answers are found by
*incremental prefix rendering*: what the template adds to ``messages[:i]`` and a generation prompt when
message i, an answer, follows. Templates that drop the reasoning of earlier turns, or end the last
turn otherwise than the others, write another beginning of a short conversation than of a long one;
there each answer is found within the whole, by writing the conversation again with a mark in the place
of each of its texts. Where neither places it exactly, the conversation is refused with the reason.

Special tokens that are written out in a message are text: marks keep them apart from the template's.
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
"""Of turns between special tokens; reasoning and tool calls as those of Qwen write them."""

PLAIN = """\
{%- for tool in tools or [] %}{{ 'Tool: ' + (tool | tojson) + '\\n\\n' }}{% endfor %}
{%- for message in messages %}
{{- message.role | capitalize + ': ' + (message.content or '') | trim }}
{%- for call in message.tool_calls or [] %}{{ '\\nCall: ' + ((call.function or call) | tojson) }}{% endfor %}
{{- eos_token if message.role == 'assistant' }}{{ '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""
"""Of text alone, for a tokenizer that has no special token but its end of text."""

BUILT_IN: Mapping[str, str] = {"chatml": CHATML, "plain": PLAIN}
"""Name -> source."""

_FORMS = re.compile(r"<\|[^<>|\s]+\|>|<(?:start|end)_of_\w+>")
"""How special tokens are written in templates that come without a list of them."""

_SAID = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")
"""What of a message the assistant says."""

_MARKS = range(0xF0000, 0xFFFFE)  # private use: in no text that means anything


class Part(NamedTuple):
    """A part of a written conversation: a text or a special token, and what its prediction counts."""

    text: str
    special: bool
    weight: float


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, with the special tokens that it writes.

    Attributes:
        source: Jinja.
        specials: texts of special tokens; whatever else it writes is text.
        variables: what templates read beside the messages: bos_token, eos_token, enable_thinking, ...
        today: what strftime_now formats; None: the day.
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
        """Read a template, and see that answers can be found in what it writes.

        Args:
            given: a name of :data:`BUILT_IN`, the source of a template, or a tokenizer_config.json
                that has one.
            specials: texts of its special tokens; default: those of the tokenizer_config.json that it
                writes, or else what looks like one: ``<|...|>``, ``<start_of_...>``, ``<end_of_...>``.
            arguments: more variables.
            today: see the class.

        Raises:
            DataError: it is no template, is refused by the sandbox, or has no place for answers.
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
        """See that a template asks for an answer, and says where one ends.

        Raises:
            DataError: it does not, or is refused.
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
        """The template with its own variables, and with the token that begins every document."""
        usual = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
        given = [
            f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} %}}\n"
            for name, value in sorted(self.variables.items())
            if usual.get(name) != value
        ]
        begins = self.render([{"role": "user", "content": "a"}]).startswith(END_OF_TEXT)
        first = "" if begins else f"{{{{- '{END_OF_TEXT}' }}}}"
        return "".join(given) + first + self.source

    def render(self, messages: Chat, *, tools: Any = None, prompt: bool = False) -> str:
        """Write a conversation.

        Args:
            messages: the conversation.
            tools: descriptions of tools, as templates read them.
            prompt: add the beginning of an answer.

        Raises:
            ChatRefusedError: the template refuses the conversation.
            DataError: the template is refused.
        """
        given = {"tools": tools, "documents": None, **self.variables}
        return self._sandbox.render(
            given | {"messages": list(messages), "add_generation_prompt": prompt}
        )

    def parts(self, messages: Chat, *, tools: Any = None) -> list[Part]:
        """Write a conversation as parts, of which the answers have weights.

        Joined, the texts of the parts are what :meth:`render` writes. An answer's weight is the number
        ``weight`` of its message, 1 where there is none; one without a text has 0. Behind it stands
        its end of turn, up to the special token.

        Raises:
            ChatRefusedError: the template refuses it, or an answer cannot be found in it.
            DataError: the template is refused.
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
        """Write a conversation with the generation prompt, as parts of weight 0.

        Raises:
            ChatRefusedError: the template refuses it.
        """
        written = _Written(self, messages, tools, prompt=True)
        return written.split(0, len(written.whole), 0.0)

    def answers(self, messages: Chat, *, tools: Any = None) -> list[str]:
        """Return what is supervised of each answer, its end of turn included."""
        written = _Written(self, messages, tools)
        return [written.plain(written.whole[a:b]) for a, b, _ in self._answers(written)]

    @cached_property
    def ends(self) -> frozenset[str]:
        """The special tokens that end an answer, the last of a conversation and those before it."""
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
            said = any(path[0] in _SAID for path, _ in _texts(message))
            if message.get("role") != ASSISTANT or not said:
                continue
            start, end = written.answer(index)
            if start < last:
                raise ChatRefusedError("the template writes two answers over each other")
            ended = list(self._special.finditer(written.whole, start, end))
            if not ended or written.whole[ended[-1].end() : end].strip():
                raise ChatRefusedError("no special token ends the answer")
            last = ended[-1].end()
            weight = message.get("weight", 1)
            if (
                isinstance(weight, bool)
                or not isinstance(weight, int | float)
                or not 0 <= weight < 1e6
            ):
                raise ChatRefusedError('"weight" of a message is no number from 0')
            yield start, last, float(weight)

    @cached_property
    def _probe(self) -> str:
        """The source, with what it writes of turns of every role: tokens may be put together."""
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
    """A conversation as a template writes it.

    Attributes:
        messages: with a mark within each special token that they write out.
        whole: the text of all of them.
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
        """Take the marks out of a text."""
        return text.replace(self._mark, "")

    def split(self, start: int, end: int, weight: float) -> list[Part]:
        """Divide a stretch of the whole at special tokens."""
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
        """Find what the assistant writes for the message ``index``: where it starts and ends.

        Raises:
            ChatRefusedError: it cannot be placed exactly.
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
        """Find where an answer starts whose beginning is written otherwise than in the whole."""
        first = self._first(index, min)
        if first is None:
            raise ChatRefusedError("the template leaves out a message")
        # the nearest message before it that has a text: its own beginning lies before that text
        earlier = (self._first(one, max) for one in range(index - 1, -1, -1))
        earliest = next((one for one in earlier if one is not None), 0)
        opening = asked.removeprefix(self._render(self.messages[:index]))
        if opening != asked:
            # of earlier turns the template may write the beginning of the prompt alone, without the
            # empty reasoning that it ends with
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
        """Find where the first, or the last, text of a message stands in the whole; None: it has none."""
        before = [one for one, _ in self._around(index, self.messages).values()]
        if not all(map(self.whole.startswith, before)):
            raise ChatRefusedError("the template writes what comes before a text by what it says")
        return which(map(len, before)) if before else None

    def _end(self, index: int, answered: str) -> int:
        """Find where an answer ends that is written otherwise when more follows."""
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
        """Write a conversation with a mark in the place of each text of a message that is written.

        Returns:
            path of the text -> what stands before and after the mark; where the text is written again,
            as the name of a tool beside its result, it is there as it is.
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
        """Put a mark into each special token that a message writes out."""
        if isinstance(value, str):
            return self.template._special.sub(
                lambda one: one[0][0] + self._mark + one[0][1:], value
            )
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(one) for key, one in value.items()}
        return [self._marked(one) for one in value] if isinstance(value, list) else value


def _frames(before: str, after: str, text: str) -> bool:
    """Tell whether a text is what stands before, something, and what stands after."""
    fits = len(before) + len(after) <= len(text)
    return fits and text.startswith(before) and text.endswith(after)


def _texts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield the paths of a message's texts and these, but for names that templates choose by.

    An empty one counts within a call alone: templates write a message otherwise that has no content.
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
    """Copy a message with another text in one place."""
    if not path:
        return text
    copy = dict(value) if isinstance(value, Mapping) else list(value)
    copy[path[0]] = _with(value[path[0]], path[1:], text)
    return copy


def _read(given: str) -> tuple[str, list[str], dict[str, str]]:
    """Read a template: its source, the special tokens that are listed beside it, and variables."""
    if given in BUILT_IN:
        return BUILT_IN[given], [], {}
    if not given.lstrip().startswith('{"') and "{" in given:
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
            fix=f"{' or '.join(BUILT_IN)}; @FILE: a file of Jinja, or a tokenizer_config.json that "
            "has chat_template",
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
