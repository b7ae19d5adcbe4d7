"""The content of a chat message in the form that a chat template takes: one text, or parts such as
`{"type": "text", "text": ...}`.

Most templates take a text. Those of models that also take images loop over parts, and render
nothing of a text. Which of the two a template takes is found by rendering a message in both forms.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

PROBE = "shardwise-0c51"

Messages = Sequence[Mapping[str, Any]]


def takes_parts(render: Callable[[Messages], str]) -> bool:
    """Return True if a template renders the text of a message only if it is in parts."""

    def renders(content: object) -> bool:
        try:
            return PROBE in render([{"role": "user", "content": content}])
        except ValueError:  # the template rejects it
            return False

    return not renders(PROBE) and renders([{"type": "text", "text": PROBE}])


def with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with its content, if it is a text, as a part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


def with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with its content, if it is parts with texts, as one text of lines."""
    content = message.get("content")
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}
