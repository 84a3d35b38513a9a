"""Supervised spans of five template structures, against spans marked by hand; and of any conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_chat.sandbox import ChatRefusedError
from minillm_chat.templates import BUILT_IN, ChatTemplate
from minillm_core import DataError

# The structures of published templates, with our own texts.

LLAMA = """\
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Mode: tools\\n" }}{%- endif %}
{{- "Known until: some year\\nDay: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Tools need a first user message") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nThese functions can be called:\\n\\n' -}}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One call at a time") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Functions\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Turns must alternate between user and assistant") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Unknown content") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""

GPT_OSS = """\
{%- macro describe(tools) %}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " + tool.description + "\\ntype " + tool.name + " = () => any;\\n" }}
    {%- endfor %}
{%- endmacro %}
{{- "<|start|>system<|message|>Today: " + strftime_now("%Y-%m-%d") + "\\nChannels: analysis, commentary, final.<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set developer_message = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set developer_message = "" %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if developer_message or tools %}
    {{- "<|start|>developer<|message|>" }}
    {%- if developer_message %}{{- "# Instructions\\n\\n" + developer_message + "\\n\\n" }}{%- endif %}
    {%- if tools %}{{- "# Tools\\n\\n" + describe(tools) }}{%- endif %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "tool_calls" in message %}
            {%- set future_final_message = namespace(found=false) %}
            {%- for future_message in loop_messages[loop.index:] %}
                {%- if future_message.role == 'assistant' and "tool_calls" not in future_message %}
                    {%- set future_final_message.found = true %}
                {%- endif %}
            {%- endfor %}
            {%- set tool_call = message.tool_calls[0] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {%- if message.content and message.thinking %}
                {{- raise_exception("content and thinking in one call") }}
            {%- elif message.content and not future_final_message.found %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
            {%- elif message.thinking and not future_final_message.found %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary json<|message|>" }}
            {{- tool_call.arguments|tojson }}
            {{- "<|call|>" }}
            {%- set last_tool_call.name = tool_call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
            {%- set last_tool_call.name = none %}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_tool_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}
            {{- raise_exception("a result without a call") }}
        {%- endif %}
        {{- "<|start|>functions." + last_tool_call.name }}
        {{- " to=assistant<|channel|>commentary<|message|>" + message.content|tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
"""

MISTRAL = """\
{%- if messages[0].role == 'system' %}{%- set system_message = messages[0].content %}{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' and loop.last and system_message is defined %}
        {{- '[INST] ' + system_message + '\\n\\n' + message.content + '[/INST]' }}
    {%- elif message.role == 'user' %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""

CHATML = """\
{% for message in messages %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""


DAY = date(2026, 1, 2)
TOOLS = [{"type": "function", "function": {"name": "clock", "description": "the time"}}]
CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}

PLAIN_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": " Hello. "},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Bye"},
]
TOOL_TURNS = [
    *PLAIN_TURNS[:3],
    {"role": "user", "content": "What time is it?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I look.",
        "thinking": "I look.",
        "tool_calls": [CALL],
    },
    {"role": "tool", "content": "12:00"},
    {"role": "assistant", "content": "Noon", "reasoning_content": "Easy.", "thinking": "Easy."},
    *PLAIN_TURNS[3:],
]


def template(source: str, **arguments: Any) -> ChatTemplate:
    return ChatTemplate.of(source, arguments=arguments, today=DAY)


# Marked by hand in each whole rendering: the text between the generation prompt and the next turn, the
# supervised span, is in [[ and ]].
BY_HAND = {
    "llama": (
        LLAMA,
        TOOL_TURNS,
        TOOLS,
        "<|endoftext|><|start_header_id|>system<|end_header_id|>\n\nMode: tools\n"
        "Known until: some year\nDay: 02 Jan 2026\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nThese functions can be called:\n\n"
        + json.dumps(TOOLS[0], indent=4)
        + "\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[Hello.<|eot_id|>]]"
        "<|start_header_id|>user<|end_header_id|>\n\nWhat time is it?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '[[{"name": "clock", "parameters": {"zone": "UTC"}}<|eot_id|>]]'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"12:00"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[Noon<|eot_id|>]]"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[Bye<|eot_id|>]]",
    ),
    "qwen": (
        QWEN,
        TOOL_TURNS,
        TOOLS,
        "<|im_start|>system\nBe brief.\n\n# Functions\n<tools>\n"
        + json.dumps(TOOLS[0])
        + "\n</tools><|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n[[ Hello. <|im_end|>]]\n"
        "<|im_start|>user\nWhat time is it?<|im_end|>\n"
        '<|im_start|>assistant\n[[<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n'
        "</tool_call><|im_end|>]]\n"
        "<|im_start|>user\n<tool_response>\n12:00\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[[Noon<|im_end|>]]\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\n\n</think>\n\nBye<|im_end|>]]\n",
    ),
    "qwen, the last question": (
        QWEN,
        TOOL_TURNS[:7],
        None,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n[[ Hello. <|im_end|>]]\n"
        "<|im_start|>user\nWhat time is it?<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\nI look.\n</think>\n\n"
        '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call><|im_end|>]]\n'
        "<|im_start|>user\n<tool_response>\n12:00\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\nEasy.\n</think>\n\nNoon<|im_end|>]]\n",
    ),
    "gemma": (
        GEMMA,
        PLAIN_TURNS,
        None,
        "<|endoftext|><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
        "<start_of_turn>model\n[[Hello.<end_of_turn>]]\n"
        "<start_of_turn>user\nAnd now?<end_of_turn>\n"
        "<start_of_turn>model\n[[Bye<end_of_turn>]]\n",
    ),
    "gpt-oss": (
        GPT_OSS,
        TOOL_TURNS,
        TOOLS,
        "<|start|>system<|message|>Today: 2026-01-02\nChannels: analysis, commentary, final.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\n// the time\n"
        "type clock = () => any;\n<|end|>"
        "<|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant[[<|channel|>final<|message|> Hello. <|end|>]]"
        "<|start|>user<|message|>What time is it?<|end|>"
        "<|start|>assistant[[ to=functions.clock<|channel|>commentary json<|message|>"
        '{"zone": "UTC"}<|call|>]]'
        '<|start|>functions.clock to=assistant<|channel|>commentary<|message|>"12:00"<|end|>'
        "<|start|>assistant[[<|channel|>final<|message|>Noon<|end|>]]"
        "<|start|>user<|message|>And now?<|end|>"
        "<|start|>assistant[[<|channel|>final<|message|>Bye<|return|>]]",
    ),
    "gpt-oss, the last question": (
        GPT_OSS,
        TOOL_TURNS[3:7],
        None,
        "<|start|>system<|message|>Today: 2026-01-02\nChannels: analysis, commentary, final.<|end|>"
        "<|start|>user<|message|>What time is it?<|end|>"
        "<|start|>assistant[[ to=functions.clock<|channel|>commentary json<|message|>"
        '{"zone": "UTC"}<|call|>]]'
        '<|start|>functions.clock to=assistant<|channel|>commentary<|message|>"12:00"<|end|>'
        "<|start|>assistant[[<|channel|>analysis<|message|>Easy.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Noon<|return|>]]",
    ),
    "chatml": (
        CHATML,
        PLAIN_TURNS,
        None,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n[[ Hello. <|im_end|>]]\n<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n[[Bye<|im_end|>]]\n",
    ),
    "mistral": (
        MISTRAL,
        PLAIN_TURNS,
        None,
        "<|endoftext|>[INST] Hi[/INST][[  Hello. <|endoftext|>]]"
        "[INST] And now?[/INST][[ Bye<|endoftext|>]]",
    ),
    "the built-in chatml": (
        "chatml",
        TOOL_TURNS,
        TOOLS,
        "<|im_start|>system\nBe brief.\n\nTools:\n" + json.dumps(TOOLS[0]) + "<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[ Hello. <|im_end|>]]\n"
        "<|im_start|>user\nWhat time is it?<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\nI look.\n</think>\n\n\n<tool_call>\n"
        '{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call><|im_end|>]]\n'
        "<|im_start|>tool\n12:00<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\nEasy.\n</think>\n\nNoon<|im_end|>]]\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n[[Bye<|im_end|>]]\n",
    ),
    "the built-in text": (
        "plain",
        TOOL_TURNS,
        None,
        "System: Be brief.\n\nUser: Hi\n\nAssistant:[[ Hello.<|endoftext|>]]\n\n"
        "User: What time is it?\n\n"
        'Assistant:[[ \nCall: {"name": "clock", "arguments": {"zone": "UTC"}}<|endoftext|>]]\n\n'
        "Tool: 12:00\n\nAssistant:[[ Noon<|endoftext|>]]\n\nUser: And now?\n\n"
        "Assistant:[[ Bye<|endoftext|>]]\n\n",
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_is_supervised_is_the_answers_and_their_ends(name: str) -> None:
    source, messages, tools, expected = BY_HAND[name]
    parts = template(source).parts(messages, tools=tools)
    written, supervised = "", False
    for part in parts:
        if (part.weight > 0) != supervised:
            written += "]]" if supervised else "[["
            supervised = part.weight > 0
        written += part.text
    assert written + ("]]" if supervised else "") == expected.replace("]][[", "")


def test_without_thinking_the_empty_reasoning_belongs_to_the_prompt() -> None:
    found = template(QWEN, enable_thinking=False).answers(TOOL_TURNS, tools=TOOLS)
    assert found[-1] == "Bye<|im_end|>"
    assert found[0] == " Hello. <|im_end|>"
    assert found[1].startswith("<tool_call>")


def test_the_tokens_that_end_an_answer() -> None:
    def ends(source: str) -> set[str]:
        return set(template(source).ends)

    assert ends(LLAMA) == {"<|eot_id|>"}
    assert ends(GEMMA) == {"<end_of_turn>"}
    assert ends(GPT_OSS) == {"<|return|>"}  # <|end|> stands between thoughts and answer
    assert ends("chatml") == {"<|im_end|>"}
    assert ends("plain") == {"<|endoftext|>"}


# Any conversation

_letters = st.text(st.sampled_from("ab \n<|>{}%äß🙂"), max_size=8)
_contents = st.lists(
    st.one_of(_letters, st.sampled_from(["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "{{ 1 }}"])),
    max_size=4,
).map("".join)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, str]]:
    turns = draw(st.integers(1, 4))
    system = [{"role": "system", "content": draw(_contents)}] if draw(st.booleans()) else []
    return system + [
        {"role": role, "content": draw(_contents)}
        for _ in range(turns)
        for role in ("user", "assistant")
    ]


STRUCTURES = {
    "llama": (LLAMA, lambda content, last: f"{content.strip()}<|eot_id|>"),
    "qwen": (
        QWEN,
        lambda content, last: (
            f"<think>\n\n</think>\n\n{content.lstrip(chr(10))}<|im_end|>"
            if last
            else f"{content}<|im_end|>"
        ),
    ),
    "gemma": (GEMMA, lambda content, last: f"{content.strip()}<end_of_turn>"),
    "gpt-oss": (
        GPT_OSS,
        lambda content, last: (
            f"<|channel|>final<|message|>{content}{'<|return|>' if last else '<|end|>'}"
        ),
    ),
    "chatml": (CHATML, lambda content, last: f"{content}<|im_end|>"),
    "plain": ("plain", lambda content, last: f" {content.strip()}<|endoftext|>"),
}
MADE = {name: template(source) for name, (source, _) in STRUCTURES.items()}


@pytest.mark.broad(2)
@pytest.mark.parametrize("name", STRUCTURES)
@given(messages=conversations())
@settings(max_examples=60, deadline=None)
def test_parts_are_the_whole_and_answers_what_the_template_writes(
    name: str, messages: list[dict[str, str]]
) -> None:
    made, expected = MADE[name], STRUCTURES[name][1]
    parts = made.parts(messages)
    assert "".join(part.text for part in parts) == made.render(messages)
    assert all(part.text in made.specials for part in parts if part.special)
    last = len(messages) - 1
    assert made.answers(messages) == [
        expected(message["content"], number == last)
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and message["content"].strip()
    ]
    other = made.parts([{**m, "content": "x" if m["content"] else ""} for m in messages])
    assert [p.text for p in parts if p.special] == [p.text for p in other if p.special]


_words = st.lists(
    st.one_of(_letters, st.sampled_from(["<think>", "</think>", "assistant\n", "{}", '"'])),
    max_size=4,
).map("".join)


@st.composite
def tool_conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Generate questions, each answered after some tool calls, sometimes with reasoning."""
    said = _words.map(lambda text: f"a{text}")
    found: list[dict[str, Any]] = (
        [{"role": "system", "content": "s"}] if draw(st.booleans()) else []
    )
    for _ in range(draw(st.integers(1, 3))):
        found.append({"role": "user", "content": draw(_words)})
        for _ in range(draw(st.integers(0, 2))):
            function = {
                "name": "f",
                "arguments": {"x": draw(st.one_of(_letters, st.integers(0, 9)))},
            }
            found.append(
                {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
            )
            found.append({"role": "tool", "content": draw(_words)})
            if draw(st.booleans()):
                thought = draw(said)
                found[-2] |= {"reasoning_content": thought, "thinking": thought}
        found.append({"role": "assistant", "content": draw(said)})
        if draw(st.booleans()):
            thought = draw(said)
            found[-1] |= {"reasoning_content": thought, "thinking": thought}
    return found


def between(opening: str, ends: str) -> re.Pattern[str]:
    return re.compile(f"{re.escape(opening)}(.*?(?:{ends}))", re.DOTALL)


BY_TOKENS = {
    "llama": (LLAMA, between("<|start_header_id|>assistant<|end_header_id|>\n\n", r"<\|eot_id\|>")),
    "qwen": (QWEN, between("<|im_start|>assistant\n", r"<\|im_end\|>")),
    "chatml": ("chatml", between("<|im_start|>assistant\n", r"<\|im_end\|>")),
    "gpt-oss": (
        GPT_OSS,  # thoughts end with <|end|>, and the answer behind them is of the same turn
        between(
            "<|start|>assistant",
            r"(?<!x)<\|call\|>|<\|return\|>|"
            r"final<\|message\|>(?:(?!<\|(?:start|message|channel|end)\|>).)*<\|end\|>",
        ),
    ),
}


@pytest.mark.broad(1)
@pytest.mark.parametrize("name", BY_TOKENS)
@given(messages=tool_conversations())
@settings(max_examples=40, deadline=None)
def test_answers_among_tools_and_reasoning_are_what_stands_between_the_tokens(
    name: str, messages: list[dict[str, Any]]
) -> None:
    source, pattern = BY_TOKENS[name]
    made = template(source)
    whole = made.render(messages)
    try:
        parts = made.parts(messages)
    except ChatRefusedError:  # Qwen's template splits such an answer, so its span cannot be located
        assert name == "qwen"
        assert any("</think>" in one["content"] for one in messages)
        return
    assert "".join(part.text for part in parts) == whole
    assert made.answers(messages) == pattern.findall(whole)


@pytest.mark.broad(2)
@pytest.mark.parametrize("name", STRUCTURES)
@given(messages=conversations())
@settings(max_examples=25, deadline=None)
def test_they_are_written_as_transformers_writes_them(
    name: str, messages: list[dict[str, str]]
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    made = replace(MADE[name], today=None)
    for prompt in (False, True):
        (expected,), _ = render_jinja_template(
            [messages], chat_template=made.source, add_generation_prompt=prompt, **made.variables
        )
        assert made.render(messages, prompt=prompt) == expected


@given(messages=conversations())
@settings(max_examples=40, deadline=None)
def test_the_mask_is_that_of_transformers_where_a_template_marks_answers(
    messages: list[dict[str, str]],
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
        "{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    (whole,), (spans,) = render_jinja_template(
        [messages], chat_template=source, return_assistant_tokens_mask=True
    )
    wanted = [whole[start:end] for start, end in spans]
    assert template(source).answers(messages) == [
        text for text in wanted if text.removesuffix("<|im_end|>").strip()
    ]


# Answers that cannot be located

ANSWERED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TURN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CALLS = [{"type": "function", "function": {"name": "weather", "arguments": {"place": "here"}}}]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (TURN, "no generation prompt"),
        (TURN + "{% if add_generation_prompt %}<|bot|>{% endif %}", "not how the template begins"),
        (TURN.replace("<|end|>", "\n") + ASKED, "no special token ends the answer"),
        ("no template at all", "there is no chat template"),
        ("{% for m in messages %}", "cannot be read"),
        ("{{ raise_exception('never') }}", "the template says: never"),
        ('{"model_max_length": 5}', "there is no chat template"),
        ('\n{\n  "model_max_length": 5\n}', "there is no chat template"),
        ("{ }", "there is no chat template"),
    ],
)
def test_a_template_without_a_place_for_answers_is_refused(source: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        template(source)


@pytest.mark.parametrize(
    ("source", "messages", "said"),
    [
        (GEMMA, [*ANSWERED, ANSWERED[1]], "Turns must alternate"),
        (LLAMA, [{"role": "assistant", "content": "b"}], "the template"),
        (  # only one of two answers is rendered
            "{% for m in messages if loop is undefined or true %}{% if m.role == 'user' or m == messages[-1] %}"
            "<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}" + ASKED,
            [*ANSWERED, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}],
            "leaves out a message",
        ),
        (  # neighbours are joined into one turn
            "{% for m in messages %}{% if loop.first or messages[loop.index0 - 1].role != m.role %}"
            "<|{{ m.role }}|>{% endif %}{{ m.content }}{% if loop.last or messages[loop.index].role != "
            "m.role %}<|end|>{% endif %}{% endfor %}" + ASKED,
            [*ANSWERED, ANSWERED[1]],
            "the template",
        ),
        (TURN + ASKED, [ANSWERED[0], {**ANSWERED[1], "weight": "much"}], '"weight"'),
        (TURN + ASKED, [ANSWERED[0], {**ANSWERED[1], "tool_calls": CALLS}], "leaves out the tool_"),
        (
            TURN + ASKED,
            [ANSWERED[0], {"role": "assistant", "content": "", "tool_calls": CALLS}, *ANSWERED],
            "leaves out the tool_calls of an answer",
        ),
        (
            "plain",
            [ANSWERED[0], {"role": "assistant", "content": "", "reasoning_content": "c"}],
            "leaves out an answer, its reasoning_content",
        ),
    ],
)
def test_an_answer_that_cannot_be_placed_is_never_guessed(
    source: str, messages: Sequence[Mapping[str, Any]], said: str
) -> None:
    with pytest.raises(ChatRefusedError, match=said):
        template(source).parts(messages)


def test_weights_of_messages_are_those_of_their_answers() -> None:
    made = template("chatml")
    messages = [
        ANSWERED[0],
        {**ANSWERED[1], "weight": 0},
        ANSWERED[0],
        {**ANSWERED[1], "weight": 0.5},
    ]
    weights = {part.weight for part in made.parts(messages)}
    assert weights == {0.0, 0.5}


def test_an_answer_without_a_text_is_no_target() -> None:
    for message in (
        {"content": " "},
        {"content": "", "name": "b"},
        {"content": "", "tool_calls": []},
    ):
        parts = template("chatml").parts([ANSWERED[0], {"role": "assistant", **message}])
        assert {part.weight for part in parts} == {0.0}


@pytest.mark.parametrize("indent", [None, 2])
def test_a_tokenizer_config_names_its_special_tokens(indent: int | None) -> None:
    config = {
        "chat_template": "{{ bos_token }}" + TURN.replace("<|end|>", "[END]") + ASKED,
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "added_tokens_decoder": {
            "1": {"content": "[END]", "special": True},
            "2": {"content": "[UNUSED]", "special": True},
            "3": {"content": "<|user|>", "special": False},
        },
    }
    made = ChatTemplate.of(json.dumps(config, indent=indent))
    assert made.specials == ("<s>", "[END]")
    assert made.answers(ANSWERED) == ["b[END]"]
    several = {
        **config,
        "chat_template": [{"name": "default", "template": config["chat_template"]}],
    }
    assert ChatTemplate.of(json.dumps(several, indent=indent)) == made


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_templates_are_plain_jinja(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    made = template(name)
    (expected,), _ = render_jinja_template(
        [TOOL_TURNS], tools=TOOLS, chat_template=made.source, **made.variables
    )
    assert made.render(TOOL_TURNS, tools=TOOLS) == expected
