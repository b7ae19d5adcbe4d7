"""Every field of OpenAI's and vLLM's requests is obeyed, harmless or refused."""

from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import ChatCompletionMessageParam
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import ValidationError

from shardwise.serve.api.conversation import Message
from shardwise.serve.api.known_fields import HARMLESS, REFUSED, BaseRequest
from shardwise.serve.api.requests import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    TokenizeRequest,
)

OF_OPENAI: list[tuple[type[BaseRequest], Any]] = [
    (ChatRequest, chat_create_params.CompletionCreateParamsStreaming),
    (ChatRequest, chat_create_params.CompletionCreateParamsNonStreaming),
    (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
    (CompletionRequest, completion_create_params.CompletionCreateParamsNonStreaming),
    (EmbeddingRequest, embedding_create_params.EmbeddingCreateParams),
]
OF_VLLM = {
    ChatRequest: (
        "add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of cache_salt "
        "chat_template chat_template_kwargs continue_final_message documents ec_transfer_params "
        "echo guided_choice guided_decoding_backend guided_grammar guided_json guided_regex "
        "guided_whitespace_pattern ignore_eos include_reasoning include_stop_str_in_output "
        "kv_transfer_params length_penalty logits_processors logprob_token_ids media_io_kwargs "
        "min_p min_tokens mm_processor_kwargs priority prompt_logprobs reasoning_effort "
        "repetition_detection repetition_penalty request_id return_mm_kwargs return_prompt_text "
        "return_token_ids return_token_offsets return_tokens_as_token_ids "
        "routed_experts_prompt_start session_id skip_special_tokens spaces_between_special_tokens "
        "stop_token_ids stream_interval structural_tag structured_outputs thinking_token_budget "
        "top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking"
    ),
    CompletionRequest: (
        "add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params "
        "guided_choice guided_decoding_backend guided_grammar guided_json guided_regex "
        "guided_whitespace_pattern ignore_eos include_stop_str_in_output kv_transfer_params "
        "length_penalty logits_processors logprob_token_ids min_p min_tokens priority "
        "prompt_embeds prompt_logprobs repetition_detection repetition_penalty request_id "
        "response_format return_mm_kwargs return_token_ids return_token_offsets "
        "return_tokens_as_token_ids routed_experts_prompt_start session_id skip_special_tokens "
        "spaces_between_special_tokens stop_token_ids stream_interval structured_outputs "
        "thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search "
        "vllm_xargs watermarking"
    ),
    EmbeddingRequest: (
        "add_special_tokens additional_data embed_dtype endianness mm_processor_kwargs normalize "
        "request_id truncate_prompt_tokens truncation_side use_activation"
    ),
    TokenizeRequest: (
        "prompt messages add_generation_prompt continue_final_message add_special_tokens "
        "chat_template chat_template_kwargs mm_processor_kwargs media_io_kwargs return_token_strs "
        "tools"
    ),
}
"""Fields of `protocol.py` in vLLM's folders chat_completion, completion and tokenize of November
2026, and of the older file of 2025."""


def unknown(request: type[BaseRequest], names: set[str]) -> set[str]:
    return names - request.model_fields.keys() - HARMLESS - REFUSED.keys()


@pytest.mark.parametrize(("request_type", "theirs"), OF_OPENAI)
def test_every_field_of_the_package_openai_is_known(
    request_type: type[BaseRequest], theirs: Any
) -> None:
    assert not unknown(request_type, set(get_type_hints(theirs)))


@pytest.mark.parametrize("request_type", OF_VLLM)
def test_every_field_of_vllm_is_known(request_type: type[BaseRequest]) -> None:
    assert not unknown(request_type, set(OF_VLLM[request_type].split()))


@pytest.mark.parametrize("message", get_args(ChatCompletionMessageParam))
def test_every_field_of_a_message_is_known(message: Any) -> None:
    """Those that cannot reach the template must be null."""
    assert not set(get_type_hints(message)) - Message.model_fields.keys()
    for name in {"function_call", "refusal", "audio"} & set(get_type_hints(message)):
        Message.model_validate({"role": "assistant", name: None})
        with pytest.raises(ValidationError, match=name):
            Message.model_validate({"role": "assistant", name: "something"})


def test_every_field_that_is_obeyed_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "serving.md").read_text(encoding="utf-8")
    requests = (ChatRequest, CompletionRequest, EmbeddingRequest)
    fields = {name for request in requests for name in request.model_fields}
    assert not {name for name in fields if f"`{name}`" not in page}


def test_a_field_is_in_one_list() -> None:
    assert not HARMLESS & REFUSED.keys()
    for request in (ChatRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest):
        assert not HARMLESS & request.model_fields.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_is_refused_unless_it_changes_nothing(name: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    for value in (None, False, [], {}, *REFUSED[name][0]):
        TokenizeRequest(**body, **{name: value})
    with pytest.raises(ValidationError, match=f"{name} must be left out: "):
        TokenizeRequest(**body, **{name: ["something"]})


def test_harmless_and_unknown_fields_are_ignored() -> None:
    extras = dict.fromkeys([*HARMLESS, "not_known_yet"], "x")
    assert CompletionRequest(prompt="a", **extras).model_dump(exclude_unset=True).keys() == {
        "prompt",
        *extras,
    }
