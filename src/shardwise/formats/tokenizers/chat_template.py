"""Chat templates: from a list of messages to the text that a chat model was trained on.

A template is a Jinja program that comes with the model, so it is untrusted code. It runs in Jinja's
sandbox, in a process of its own with limits of time and memory: `template_process.py` starts this
file as a program, which therefore imports nothing of Shardwise. The names that a template may use
follow transformers: https://huggingface.co/docs/transformers/chat_templating
"""

import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_REASON = 500


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the assistant's text for training and
    renders as its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=4)
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


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Render a template. Raises ValueError, with the template's own message if it rejects the
    messages (unknown roles, roles that do not alternate)."""
    template = compile_template(source)
    try:
        return template.render(**variables)
    except MemoryError:
        raise
    except Exception as error:  # a program of the model, which may raise anything
        reason = str(error)[:MAX_REASON]
        raise ValueError(
            f"the model's chat template does not accept these messages: {reason}"
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


def _limit_memory(num_bytes: int) -> None:
    """Limit this process to `num_bytes` more than it has now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _reply(request: bytes, cpu_s: float) -> dict[str, str]:
    """Render, compiling included, within a limit of time at which SIGPROF ends this process."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        source, variables = json.loads(request)
        return {"text": render(source, variables)}
    except (ValueError, RecursionError) as error:
        return {"error": str(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(cpu_s: float, memory_bytes: int) -> None:
    """Answer the requests on stdin, one line of JSON each, until it is closed."""
    _limit_memory(memory_bytes)
    try:
        for request in sys.stdin.buffer:
            reply = json.dumps(_reply(request, cpu_s))
            sys.stdout.buffer.write(reply.encode() + b"\n")
            sys.stdout.buffer.flush()
    except MemoryError:  # no state of this process is known any more
        signal.raise_signal(signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
