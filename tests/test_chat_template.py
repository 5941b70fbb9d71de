"""Chat templates: equal to transformers, sandboxed, and failing in one line."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from conversations import CONVERSATIONS, HI
from tiny_models import CHAT_TEMPLATE

from minfer.errors import Refusal
from minfer.models.chat_template import render
from minfer.models.gguf import open_gguf

MARKUP = [{"role": "user", "content": "<b>&amp;</b> {{ 1 }} {% if %} <|im_end|>"}]


def test_by_hand() -> None:
    text = render(HI, CHAT_TEMPLATE, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(HI, CHAT_TEMPLATE, add_generation_prompt=False) == (
        "<|im_start|>user\nHi<|im_end|>\n"
    )


@pytest.mark.parametrize(
    "template, text",
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hi</s>"),
        ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{{ {'k': '<é>'} | tojson }}", '{"k": "<é>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ strftime_now('%Y') }}", str(datetime.datetime.now().year)),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0]['role'] }}{% endgeneration %}!", "user!"),
        ("{{ missing }}{% if tools %}x{% endif %}", ""),
    ],
)
def test_what_templates_rely_on(template: str, text: str) -> None:
    assert render(HI, template, add_generation_prompt=False, bos="<s>", eos="</s>") == text


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "these messages: roles must alternate"),
        ("a\n{% if %}", "does not compile at line 2"),
        ("{% nonsense %}", "does not compile at line 1"),
        ("{{ messages[0].content + 1 }}", "fails on these messages: TypeError"),
        ("{{ messages[5].content }}", "fails on these messages: UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% for i in range(999999999) %}{% endfor %}", "OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_errors_of_a_template_are_refusals(template: str, message: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        render(HI, template, add_generation_prompt=True)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


@pytest.mark.model
def test_equal_to_transformers(smollm2: Path, smollm2_transformers: Any) -> None:
    template: Any = open_gguf(smollm2).metadata["tokenizer.chat_template"]
    for messages in [*CONVERSATIONS, MARKUP]:
        for prompt in (True, False):
            wanted = smollm2_transformers.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=prompt
            )
            assert render(messages, template, add_generation_prompt=prompt) == wanted
    assert wanted.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
