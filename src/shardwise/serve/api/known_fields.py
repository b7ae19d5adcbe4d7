"""The fields of OpenAI's and vLLM's requests that Shardwise knows. Each is one of:

    obeyed     a field of the request's class
    harmless   accepted and ignored, because no value of it would change a completion (HARMLESS)
    refused    accepted with the values that change nothing, and refused with any other (REFUSED)

Others are unknown and ignored: clients of newer versions send them. Sources: the parameter types of
the package openai, and https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator

HARMLESS_OF_OPENAI = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "prediction", "parallel_tool_calls",
)  # fmt: skip
"""Bookkeeping, caching and billing of their service, and a guess that saves time."""
HARMLESS_OF_VLLM = (
    "request_id", "session_id", "stream_interval", "guided_decoding_backend", "length_penalty",
    "include_reasoning", "spaces_between_special_tokens", "return_token_offsets",
    "return_mm_kwargs", "routed_experts_prompt_start", "additional_data",
)  # fmt: skip
"""Names of requests, sizes of chunks, the choice of a backend, and what has no effect without beam
search, reasoning parsers, multimodal inputs, experts or slow tokenizers."""
HARMLESS = frozenset(HARMLESS_OF_OPENAI + HARMLESS_OF_VLLM)
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "audio is not supported"),
    "modalities": ((["text"],), "only text is supported"),
    "function_call": (("none", "auto"), "tools are not supported"),
    "moderation": ((), "there is no moderation"),
    "tools": ((), "tools are not supported"),
    "verbosity": (("medium",), "models take no such setting"),
    "web_search_options": ((), "there is no web search"),
    "use_beam_search": ((), "there is no beam search"),
    "best_of": ((1,), "all completions are returned"),
    "watermarking": ((), "texts are not watermarked"),
    "echo": ((), "a chat is not echoed"),
    "documents": ((), "put documents into the messages"),
    "chat_template": ((), "the model's own template is used"),
    "mm_processor_kwargs": ((), "only text is supported"),
    "media_io_kwargs": ((), "only text is supported"),
    "prompt_embeds": ((), "prompts are texts or token ids"),
    "logprob_token_ids": ((), "logprobs are those of the most probable tokens"),
    "return_tokens_as_token_ids": ((), "tokens are returned as texts"),
    "return_token_ids": ((), "token ids are not returned"),
    "return_prompt_text": ((), "the prompt is not returned; /tokenize shows its tokens"),
    "logits_processors": ((), "there are no processors of logits"),
    "structural_tag": ((), "structural tags are not supported"),
    "guided_whitespace_pattern": ((), "the whitespace of JSON is fixed"),
    "thinking_token_budget": ((-1,), "thoughts are not counted"),
    "repetition_detection": ((), "repetition is not detected"),
    "kv_transfer_params": ((), "KV caches are not transferred"),
    "ec_transfer_params": ((), "caches are not transferred"),
    "vllm_xargs": ((), "there are no extensions"),
    "normalize": ((True,), "embeddings are normalized"),
    "use_activation": ((True,), "embeddings are normalized"),
    "embed_dtype": (("float32",), "embeddings are in float32"),
    "endianness": (("native", "little"), "embeddings are little-endian"),
}
"""The values of a field, besides null, false and what is empty, that change nothing; and why others
are refused."""


class StrictModel(BaseModel):
    """An object of JSON whose types are strict: "1" is not 1."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class BaseRequest(StrictModel):
    """The body of a request; fields that its class does not have are checked by name."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None

    @model_validator(mode="after")
    def check_fields(self) -> Self:
        """Raise ValueError for a known field that would change the completion but is not obeyed."""
        for name, value in (self.model_extra or {}).items():
            harmless, reason = REFUSED.get(name, ((), ""))
            if reason and value and value not in harmless:
                raise ValueError(f"{name} must be left out: {reason}")
        return self
