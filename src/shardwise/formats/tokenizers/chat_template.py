"""Chat templates: from a list of messages to the text that a chat model was trained on.

A template is a Jinja program that comes with the model, so it is untrusted code and runs in a
sandbox. The names that it may use follow transformers:
https://huggingface.co/docs/transformers/chat_templating
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the assistant's text for training and
    renders as its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template. Raises ValueError, with the line, if its syntax is wrong."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template is not valid Jinja (line {error.lineno}): {error.message}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"the chat template is nested too deeply: {error}") from error


def render_chat(
    template: jinja2.Template,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, str],
    add_generation_prompt: bool,
) -> str:
    """Render `messages` as conversations in the training data of the model.

    `special` maps bos_token, eos_token and so on to their texts. With `add_generation_prompt` the
    text ends where the assistant's reply begins. Raises ValueError with the template's own message
    if it rejects the messages (unknown roles, roles that do not alternate).
    """
    try:
        return template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special,
        )
    except Exception as error:  # a program of the model, which may raise anything
        raise ValueError(
            f"the model's chat template does not accept these messages: {error}"
        ) from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON: Jinja's own filter escapes `<`, `>`, `&` and `'` for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
