"""Request bodies: OpenAI's fields and vLLM's additions, and their conversion to `SamplingParams`.

https://platform.openai.com/docs/api-reference,
https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html

A field that is null counts as absent. `known_fields.py` says what happens to fields that are not
here. Types are strict: "1" is not 1.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from shardwise.serve.api.conversation import Messages, TemplateRequest
from shardwise.serve.api.known_fields import BaseRequest, StrictModel
from shardwise.serve.request import MAX_LOGPROBS, GrammarKind, SamplingParams
from shardwise.writing.json_text import json_text

MAX_PROMPTS = 1024  # the length of an engine's queue
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_BAD_WORDS = 1024
DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as in OpenAI's API; a chat has no default


PROMPT_FORMS = "a text, a list of texts, a list of token ids or a list of such lists"


def read_prompts(value: object) -> list[str | list[int]]:
    """Return a list of prompts from one text, one list of token ids, or a list of either."""
    if isinstance(value, str) or is_token_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"must be {PROMPT_FORMS}, and not empty")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"has {len(value)} prompts, but the limit is {MAX_PROMPTS}")
    are_texts = all(isinstance(each, str) for each in value)
    if not are_texts and not all(is_token_ids(each) for each in value):
        raise ValueError(f"must be {PROMPT_FORMS}, none empty")
    if not all(value):
        raise ValueError("is empty; give it at least one token")
    return value


def is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def read_stop(value: object) -> list[str] | None:
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a text or a list of texts")
    if len(texts) > MAX_STOPS or any(not 0 < len(text) <= MAX_STOP_CHARACTERS for text in texts):
        raise ValueError(
            f"must be at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters"
        )
    return texts


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(
        read_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
    ),
]
Stop = Annotated[
    list[str] | None, PlainValidator(read_stop, json_schema_input_type=str | list[str] | None)
]
Grammar = tuple[GrammarKind, str]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
BadWords = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
    Field(fail_fast=True, max_length=MAX_BAD_WORDS),
]


class TruncationRequest(BaseRequest):
    """Fields that shorten a prompt; -1 keeps as many tokens as fit."""

    truncate_prompt_tokens: Int64 | None = None
    truncation_side: Literal["left", "right"] | None = None

    def truncated(self, tokens: list[int], num_fitting: int) -> list[int]:
        """Return the last tokens of a prompt, or the first if `truncation_side` is "right"."""
        limit = self.truncate_prompt_tokens
        if limit is None:
            return tokens
        if limit == 0 or limit < -1:
            raise ValueError(f"truncate_prompt_tokens is {limit}, but it must be -1 or at least 1")
        num_kept = max(1, num_fitting) if limit == -1 else limit
        return tokens[:num_kept] if self.truncation_side == "right" else tokens[-num_kept:]


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None  # usage comes with the last chunk


class ResponseFormat(StrictModel):
    """OpenAI's field for JSON output; `json_schema` is {"name": ..., "schema": {...}}."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    @property
    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return "json", ""
        schema = (self.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise ValueError(
                "response_format must have the schema under json_schema.schema, as an object"
            )
        return "json_schema", json_text(schema)


def read_grammar(name: str, value: object) -> Grammar:
    """Return the grammar under a name of vLLM's `structured_outputs`."""
    match name, value:
        case "json", str():
            return "json_schema", value
        case "json", dict():
            return "json_schema", json_text(value)
        case "json_object", True:
            return "json", ""
        case "regex", str():
            return "regex", value
        case "grammar", str():
            return "grammar", value
        case "choice", [_, *_] if all(isinstance(each, str) and each for each in value):
            return "choice", json_text(value)
    raise ValueError(
        f"structured_outputs must not have {name!r:.40} with this value; it takes a schema under "
        "json, a text under regex or grammar, texts under choice, or true under json_object"
    )


SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "seed", "n", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids", "bad_words",
    "prompt_logprobs",
)  # fmt: skip
"""Fields that have the same name in `SamplingParams`."""


class GenerationRequest(TruncationRequest):
    """Fields that completions and chats share."""

    temperature: float | None = None
    top_k: Int64 | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=1024)
    seed: Int64 | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = Field(default=None, fail_fast=True, max_length=1024)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: BadWords | None = None
    prompt_logprobs: Int64 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = None

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with a chunk that reports the tokens used."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def limit_name(self) -> str | None:
        """The field that limits the tokens of the completion; None if it was left out."""
        return None if self.max_tokens is None else "max_tokens"

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the completion, which at most one of OpenAI's and vLLM's fields sets."""
        grammar = None if self.response_format is None else self.response_format.grammar
        fields = [
            ("json", self.guided_json),
            ("regex", self.guided_regex),
            ("choice", self.guided_choice),
            ("grammar", self.guided_grammar),
            *(self.structured_outputs or {}).items(),
        ]
        given = [
            (name, value) for name, value in fields if value is not None and value is not False
        ]
        if len(given) + (grammar is not None) > 1:
            raise ValueError(
                "response_format, structured_outputs and the fields of guided decoding must not be "
                "combined: one of them is obeyed"
            )
        return read_grammar(*given[0]) if given else grammar

    def to_params(
        self, defaults: SamplingParams, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Return `defaults` with the fields that were given.

        Raises ValueError for values out of range and for fields that conflict.
        """
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options must be combined with stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs must not be combined with stream: true")
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        given = {name: value for name, value in given.items() if value is not None}
        bias = {token_id(name): value for name, value in (self.logit_bias or {}).items()}
        return replace(
            defaults,
            **given,
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias=bias,
            structure=self.grammar,
        )


def token_id(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 10):
        raise ValueError(f"logit_bias must have token ids as keys, not {name!r:.40}")
    return int(name)


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`: continue a text."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Int64 | None = None
    best_of: Int64 | None = None
    suffix: str | None = None

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """Return `defaults` with the fields of the request."""
        if self.suffix:
            raise ValueError("suffix must be left out: fill-in-the-middle is not supported")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError(
                f"best_of is {self.best_of}, but must equal n: all completions are returned"
            )
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0, but must be at least 1 unless echo is true")
        if self.echo and self.truncate_prompt_tokens is not None:
            raise ValueError("truncate_prompt_tokens must not be combined with echo")
        if self.echo and self.logprobs is not None and self.stream and (self.n or 1) > 1:
            raise ValueError("n must be 1 in a stream with echo and logprobs")
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens or 1
        params = self.to_params(defaults, max_tokens, self.logprobs)
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            return replace(params, prompt_logprobs=self.logprobs)
        return params


class ChatRequest(GenerationRequest, TemplateRequest):
    """`POST /v1/chat/completions`: answer a conversation."""

    messages: Messages
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**63)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    tool_choice: Any = None

    @property
    def limit_name(self) -> str | None:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return super().limit_name

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """Return `defaults` with the fields of the request."""
        if (self.tools or self.functions) and self.tool_choice != "none":
            raise ValueError("tools are not supported: leave them out, or set tool_choice to none")
        if self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice must be none or auto: tools are not supported")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs must be combined with logprobs: true")
        max_tokens = None if self.limit_name is None else getattr(self, self.limit_name)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.to_params(defaults, max_tokens, logprobs)


class EmbeddingRequest(TruncationRequest):
    """`POST /v1/embeddings`: embed texts as vectors."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int64 | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(TemplateRequest):
    """`POST /tokenize`: token ids of a text, or of a conversation in the model's chat template."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseRequest):
    """`POST /detokenize`: text of token ids."""

    tokens: TokenIds
