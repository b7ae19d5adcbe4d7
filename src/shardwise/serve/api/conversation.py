"""Conversations in requests, and what the chat template of the model gets of them.

https://platform.openai.com/docs/api-reference/chat/create#chat_create-messages,
https://huggingface.co/docs/transformers/chat_templating
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic_core import from_json

from shardwise.formats.tokenizers.tokenizer import TEMPLATE_VARIABLES, Tokenizer
from shardwise.serve.api.known_fields import BaseRequest, StrictModel

END_MARK = "shardwise-continues-here "
"""Marks the end of the last message, for `continue_final_message`; a template that trims contents
removes the space."""


def read_content(value: object) -> str | list[dict[str, str]] | None:
    """Check the content of a message; parts must be texts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ValueError("must be a text or a list of parts")
    for part in value:
        if part.get("type") != "text":
            raise ValueError(
                f"has a part of type {part.get('type')!s:.40}, but this model takes only text"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError("has a part of type text without a text")
    return [{"type": "text", "text": part["text"]} for part in value]


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


Content = Annotated[
    str | list[dict[str, str]] | None,
    PlainValidator(read_content, json_schema_input_type=str | list[TextPart] | None),
]


def read_tool_calls(value: object) -> list[dict[str, Any]] | None:
    """Return past tool calls with the arguments of each as an object, which templates write or walk
    through; OpenAI's API has them as a text of JSON.
    """
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(call, dict) for call in value):
        raise ValueError("must be a list of objects")
    return [
        {**call, "function": read_function(call["function"])} if "function" in call else call
        for call in value
    ]


def read_function(function: object) -> dict[str, Any]:
    if not isinstance(function, dict):
        raise ValueError("has a function that is no object")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments or "{}", allow_inf_nan=False)
        except ValueError as error:
            raise ValueError(f"has arguments that are not valid JSON: {error}") from None
    if not isinstance(arguments, dict | None):
        raise ValueError("has arguments that are no object")
    return {**function, "arguments": arguments or {}}


ToolCalls = Annotated[
    list[dict[str, Any]] | None,
    PlainValidator(read_tool_calls, json_schema_input_type=list[dict[str, Any]] | None),
]


class Message(StrictModel):
    role: str
    content: Content = None
    name: str | None = None
    tool_calls: ToolCalls = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: None = None
    refusal: None = None
    audio: None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message for chat templates: they do not know OpenAI's role `developer`, and
        have either name for reasoning.
        """
        message = self.model_dump(exclude_none=True)
        reasoning = self.reasoning_content if self.reasoning is None else self.reasoning
        if reasoning is not None:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        role = "system" if self.role == "developer" else self.role
        return {**message, "role": role, "content": self.content or ""}


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]


class TemplateRequest(BaseRequest):
    """Fields of a request whose prompt the chat template renders."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the template besides the messages. Raises ValueError for its own names."""
        given = self.chat_template_kwargs or {}
        for name in given:
            if name in TEMPLATE_VARIABLES:
                raise ValueError(f"chat_template_kwargs must not have {name}: the server sets it")
        if self.reasoning_effort is None:
            return given
        thinks = self.reasoning_effort != "none"
        return {"reasoning_effort": self.reasoning_effort, "enable_thinking": thinks, **given}


def render_prompt(
    tokenizer: Tokenizer, body: TemplateRequest, conversation: Sequence[Message]
) -> str:
    """Render a conversation as a prompt: it ends where the assistant's reply begins, or with
    `continue_final_message` where the last message ends.

    Raises ValueError as `Tokenizer.chat` does, and for fields that exclude each other.
    """
    messages = [message.for_template() for message in conversation]
    variables = body.template_variables
    if not body.continue_final_message:
        return tokenizer.chat(messages, body.add_generation_prompt is not False, variables)
    if body.add_generation_prompt:
        raise ValueError("continue_final_message must not be combined with add_generation_prompt")
    messages[-1]["content"] = with_end_mark(messages[-1]["content"])
    rendered = tokenizer.chat(messages, False, variables)
    end = rendered.rfind(END_MARK.rstrip())
    if end < 0:
        raise ValueError(
            "continue_final_message must be left out: the model's chat template does not render "
            "the end of the last message"
        )
    text = rendered[:end]
    return text if rendered.startswith(END_MARK, end) else text.rstrip()


def with_end_mark(content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    if not content:
        raise ValueError("continue_final_message must have a text to continue in the last message")
    if isinstance(content, str):
        return content + END_MARK
    *others, last = content
    return [*others, {**last, "text": last["text"] + END_MARK}]
