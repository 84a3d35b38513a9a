"""The exported model generates the run's answers in Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import minillm_core as minillm
from minillm_chat.talk import ChatModel
from minillm_chat.templates import ChatTemplate
from minillm_core.documents import END_OF_TEXT

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is it? äß"},
    {"role": "assistant", "content": "It is more."},
    {"role": "user", "content": "Why?"},
]


@pytest.mark.slow
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("template", ["chatml", "plain"])
def test_the_exported_tokenizer_writes_chats_as_training_did(
    trained: Any, other_boundary: Any, tmp_path: Path, template: str, other: bool
) -> None:
    from transformers import AutoTokenizer

    more = other_boundary() if other else {}
    run = minillm.Run.open(trained(sft__template=template, **more))
    model = ChatModel.of(run)
    run.export(tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    found = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)
    assert found == model.ids(model.template.prompt(TURNS))
    config = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert set(config["eos_token_id"]) == {tokenizer.eos_token_id, *model.ends}


@pytest.mark.slow
def test_the_exported_model_answers_as_the_run_does(trained: Any, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    run = minillm.Run.open(trained())
    model = ChatModel.of(run)
    run.export(tmp_path / "model")
    prompt = model.ids(model.template.prompt(TURNS[3:]))
    drawn = run.stream(prompt, ends=model.ends, max_tokens=12, temperature=0)
    assert "".join(drawn) is not None
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    given = torch.tensor([prompt])
    wrote = loaded.generate(given, max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    ends = {*model.ends, run.specials["end_of_text"]}
    assert [one for one in wrote if one not in ends] == drawn.generation.ids


def test_variables_go_with_the_template() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content + mode }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    config = json.dumps({"chat_template": source, "bos_token": "<s>"})
    made = ChatTemplate.of(config, arguments={"mode": '"x"'})
    for begins in (END_OF_TEXT, "</s>"):
        alone = ChatTemplate(made.exported, made.specials, {"bos_token": begins})
        assert alone.render(TURNS) == begins + made.render(TURNS)
    assert ChatTemplate.of("plain").exported.startswith("{{- bos_token }}")


@pytest.mark.parametrize("token", ["</s>", END_OF_TEXT, "<|im_start|>"])
def test_an_exported_template_begins_with_the_boundary_once_however_often_it_is_exported(
    token: str,
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    made = ChatTemplate.of("chatml")
    first = "" if token == "<|im_start|>" else token  # which begins every turn
    for _ in range(3):
        (found,), _ = render_jinja_template(
            [TURNS], chat_template=made.exported, bos_token=token, eos_token=token
        )
        assert found == first + ChatTemplate.of("chatml").render(TURNS)
        config = {"chat_template": made.exported, "bos_token": token, "eos_token": token}
        made = ChatTemplate.of(json.dumps(config))
        assert made.render(TURNS) == found
