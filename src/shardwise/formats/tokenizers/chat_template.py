"""Chat templates: how a list of messages becomes the one text that a chat model was trained on.

A template is a Jinja program that comes with the model, so it is untrusted code and runs in a
sandbox. What it may use is fixed by custom:
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
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training; as text
    it is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> jinja2.Template:
    """Compile a model's chat template once; a ValueError says where its syntax is wrong."""
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
            f"the chat template is not valid Jinja (line {error.lineno}): {error.message}."
        ) from error
    except RecursionError as error:
        raise ValueError(f"the chat template is nested too deeply to be read: {error}.") from error


def render_chat(
    template: jinja2.Template,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, str],
    add_generation_prompt: bool,
) -> str:
    """Write `messages` as the model saw conversations in training; `special` holds bos_token,
    eos_token and so on.

    With `add_generation_prompt` the text ends where the assistant begins to speak. Raises
    ValueError with the template's own complaint (a role it does not know, roles that do not
    alternate).
    """
    try:
        return template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special,
        )
    except Exception as error:  # the template is somebody else's program: whatever it raises is about these messages
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
    """JSON as it is: Jinja's own filter would escape `<`, `>`, `&` and `'` for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
