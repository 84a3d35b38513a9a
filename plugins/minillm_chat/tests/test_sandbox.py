"""Hostile templates are refused: no access to Python, and no unbounded work or memory."""

from __future__ import annotations

import time

import pytest

from minillm_chat.sandbox import LARGEST, ChatRefusedError, Sandbox
from minillm_chat.templates import ChatTemplate
from minillm_core import DataError

MESSAGES = [{"role": "user", "content": "a"}]
OFTEN = "{{% for i in range(99999) %}}{}{{% endfor %}}"
LONG = "{{% set l = range(99999)|list %}}" + OFTEN
GROWING = "{{% set ns = namespace(x='ab') %}}{{% for i in range(60) %}}{} %}}{{% endfor %}}"

REFUSED = {
    "a class": "{{ messages.__class__ }}",
    "all classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a class": "{{ cycler.__init__.__globals__ }}",
    "a class by a filter": "{{ ['']|map('attr', '__class__')|list }}",
    "a name in a namespace": "{% set ns = namespace(__class__=1) %}",
    "a list that is changed": "{{ messages.append(1) }}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "a long text": "{{ 'x' * 10000000000 }}",
    "a long list": "{{ (range(99999)|list * 100000)|length }}",
    "a power": "{{ 9 ** 9 ** 9 }}",
    "large numbers": (
        "{% set ns = namespace(n=7) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}"
    ),
    "a wide field": "{{ 'x'.ljust(1000000000) }}",
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "a wide format by a filter": "{{ '%1000000000d'|format(1) }}",
    "a wide format by a method": "{{ '{:>1000000000}'.format(1) }}",
    "a wide indent": "{{ messages|tojson(indent=1000000000) }}",
    "a long indent": "{{ 'a'|indent('x' * 1000) }}",
    "doubling by ~": GROWING.format("{% set ns.x = ns.x ~ ns.x"),
    "doubling by +": GROWING.format("{% set ns.x = ns.x + ns.x"),
    "doubling by replace": GROWING.format("{% set ns.x = ns.x.replace('a', ns.x)"),
    "doubling by the filter replace": GROWING.format("{% set ns.x = ns.x|replace('a', ns.x)"),
    "doubling by join": GROWING.format("{% set ns.x = ns.x.join(['a', ns.x, 'a'])"),
    "doubling by a block": GROWING.format(
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y"
    ),
    "one text often": "{{ (['x' * 1000000] * 100000)|join }}",
    "sorting often": LONG.format("{{ l|sort|length }}"),
    "filters of filters": LONG.format("{{ l|map('string')|map('string')|max }}"),
    "a search in a list": LONG.format("{{ 'x' in l }}"),
    "a search in a list by a test": LONG.format("{{ 'x' is in(l) }}"),
    "searches in a list by a filter": LONG.format("{{ l|select('in', l)|list }}"),
    "a search in a list by a method": LONG.format("{{ l.count(1) }}"),
    "a comparison of lists": LONG.format("{{ l == (range(99999)|list) }}"),
    "a copy of a list": LONG.format("{% set m = l[::-1] %}"),
    "a search in a text": "{% set s = 'ab' * 999999 %}" + OFTEN.format("{{ 'abb' in s }}"),
    "a search in a text by a method": (
        "{% set s = 'ab' * 999999 %}" + OFTEN.format("{{ s.find('abb') }}")
    ),
    "literal text often": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
}


SLOW = ("sorting often", "a search in a text", "a search in a text by a method")


@pytest.mark.broad(12)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in REFUSED]
)
def test_what_would_escape_or_never_end_is_refused(name: str) -> None:
    begun = time.monotonic()
    with pytest.raises(DataError, match="the chat template is refused"):
        Sandbox(REFUSED[name]).render({"messages": MESSAGES})
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    "source",
    [
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'a' %}",
        "{{ lipsum(n=9) }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_what_fails_refuses_the_conversation(source: str) -> None:
    with pytest.raises(ChatRefusedError):
        Sandbox(source).render({"messages": MESSAGES})
    with pytest.raises(DataError):
        ChatTemplate.of(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{" * 50_000,
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{% if 1 %}" * 200 + "{% endif %}" * 200,
        "{% for x in messages %}" * 30 + "{% endfor %}" * 30,
        "{{ 'x'|center(10) }}",
        "x" * (LARGEST + 1),
    ],
)
def test_what_cannot_be_compiled_is_refused(source: str) -> None:
    with pytest.raises(DataError, match="the chat template"):
        Sandbox(source)


def test_every_conversation_has_a_budget_of_its_own() -> None:
    made = Sandbox("{% for i in range(100000) %}{% endfor %}x")
    assert {made.render({}) for _ in range(9)} == {"x"}


def test_the_language_is_that_of_chat_templates() -> None:
    source = (
        "{%- for m in messages %}\n"
        "    {%- if loop.index0 == 1 %}{% continue %}{% endif %}\n"
        "    {%- if loop.index0 == 3 %}{% break %}{% endif %}\n"
        "{{ loop.length }}{{ loop.last }}{{ m.a | tojson }}{{ m.b }}{{ '%s' | format(1) }}\n"
        "{% endfor %}\n"
        "{% generation %}{{ [1, 2] | join('<') }}{% endgeneration %}"
        "{{ 'a-b'.split('-')[-1] }}{{ 'aXa'.replace('X', 'é') }}{{ namespace(x=2).x * 3 }}"
    )
    records = [{"a": "<é>"}, {}, {"a": {"b": [None, True]}}, {}]
    assert Sandbox(source).render({"messages": records}) == (
        '4False"<é>"1\n4False{"b": [null, true]}1\n1<2baéa6'
    )
