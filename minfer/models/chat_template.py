"""Chat templates: the Jinja text of a model file, rendered in a sandbox.

The environment is the one templates are written for: that of transformers' chat templating.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from minfer.errors import Refusal

Message = Mapping[str, Any]


def render(
    messages: Sequence[Message],
    template: str,
    *,
    add_generation_prompt: bool,
    bos: str = "",
    eos: str = "",
    now: datetime.datetime | None = None,
) -> str:
    """The prompt text of a conversation; encode it with `special=True`.

    messages: {"role": ..., "content": ...} each. bos, eos: the texts of those tokens. now: the time
    that templates write, default the clock's. Refuses a template that does not compile, fails, or
    reaches out of its sandbox.
    """
    import jinja2

    try:
        text: str = _compile(template).render(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            bos_token=bos,
            eos_token=eos,
            tools=None,
            documents=None,
            strftime_now=(now or datetime.datetime.now()).strftime,
        )
    except _Raised as error:
        raise _refusal(f"refuses these messages: {error}") from None
    except jinja2.TemplateSyntaxError as error:
        raise _refusal(f"does not compile at line {error.lineno}: {error.message}") from None
    except Exception as error:  # a template is a program: what it raises is its own failure
        raise _refusal(f"fails on these messages: {type(error).__name__}: {error}") from None
    return text


class _Raised(Exception):
    """What a template raises by `raise_exception`."""


def _refusal(what: str) -> Refusal:
    return Refusal(
        "0.2", f"the chat template of this model {what}; change them or give a plain prompt"
    )


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the model's part for training; here its body is just text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(template)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise _Raised(message)
