"""`POST /v1/chat/completions`: answer a conversation.
https://platform.openai.com/docs/api-reference/chat"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from shardwise.serve.api.requests import ChatRequest
from shardwise.serve.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    TokenLogprob,
    now_s,
)
from shardwise.serve.api.service import Service, count_usage, format_prompt_logprobs
from shardwise.serve.request import Logprob, Request, RequestOutput


async def chat_request(service: Service, body: ChatRequest) -> Request:
    """Return the engine's request for a conversation.

    Raises ValueError, or ApiError for an unknown model, if the body cannot be served.
    """
    service.model_name(body)
    params = body.params(service.settings.default_params)
    tokens = await service.chat_tokens(body)
    starts_text = not body.continue_final_message
    return service.make_request(tokens, params, body, starts_text)


async def complete_chat(
    service: Service, body: ChatRequest, request: Request, id: str
) -> ChatCompletion:
    """Return all completions of a conversation in one object."""
    output = RequestOutput.empty(request)
    async with aclosing(service.deltas([request])) as deltas:
        async for _, delta in deltas:
            output.add(delta)
    choices = [
        ChatChoice(
            index=completion.index,
            message=ChatMessage(content=completion.text),
            finish_reason=completion.finish_reason or "length",
            stop_reason=completion.stop_reason,
            logprobs=format_logprobs(service, body, completion.logprobs),
        )
        for completion in output.outputs
    ]
    prompt_logprobs = None
    if output.prompt_logprobs is not None:
        prompt_logprobs = format_prompt_logprobs(service, output.prompt_logprobs)
    return ChatCompletion(
        id=id,
        model=service.model_name(body),
        choices=choices,
        usage=count_usage([output]),
        prompt_logprobs=prompt_logprobs,
    )


async def stream_chat(
    service: Service, body: ChatRequest, request: Request, id: str
) -> AsyncGenerator[str, None]:
    """Yield chunks with one choice each: first the role, then the text, last the finish reason."""
    output = RequestOutput.empty(request)
    created = now_s()
    model = service.model_name(body)
    started = set[int]()

    def chunk(*choices: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(id=id, created=created, model=model, choices=list(choices))

    async with aclosing(service.deltas([request])) as deltas:
        async for _, delta in deltas:
            output.add(delta)
            if delta.index not in started:
                started.add(delta.index)
                role = ChatDelta(role="assistant", content="")
                yield chunk(ChatChunkChoice(index=delta.index, delta=role)).model_dump_json()
            if delta.text or delta.finish_reason or delta.logprobs:
                choice = ChatChunkChoice(
                    index=delta.index,
                    delta=ChatDelta(content=delta.text or None),
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                    logprobs=format_logprobs(service, body, delta.logprobs),
                )
                yield chunk(choice).model_dump_json()
    if body.wants_usage:
        yield chunk().model_copy(update={"usage": count_usage([output])}).model_dump_json()


def format_logprobs(
    service: Service, body: ChatRequest, logprobs: Sequence[Logprob]
) -> ChatLogprobs | None:
    """Return log-probabilities in the format of the API; None if they were not requested."""
    if not body.logprobs:
        return None

    def entry(id: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(
            token=service.token_text(id), logprob=logprob, bytes=list(service.token_bytes(id))
        )

    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                **dict(entry(token.id, token.logprob)),
                top_logprobs=[entry(*each) for each in token.top],
            )
            for token in logprobs
        ]
    )
