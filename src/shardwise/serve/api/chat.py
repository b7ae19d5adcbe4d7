"""`POST /v1/chat/completions`: the model answers a conversation.
https://platform.openai.com/docs/api-reference/chat"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from shardwise.serve.api.requests import ChatRequest
from shardwise.serve.api.responses import (
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    TokenLogprob,
    now_s,
)
from shardwise.serve.api.service import Service, prompt_logprobs, usage_of
from shardwise.serve.request import Logprob, Request, RequestOutput


async def chat_request(service: Service, body: ChatRequest) -> Request:
    """Return the request of the engine for a conversation."""
    service.model_name(body)
    params = body.params()
    return service.request(await service.chat_tokens(body), params, body)


async def chat(service: Service, body: ChatRequest, request: Request, id: str) -> Chat:
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
            logprobs=chat_logprobs(service, body, completion.logprobs),
        )
        for completion in output.outputs
    ]
    scores = output.prompt_logprobs
    return Chat(
        id=id,
        model=service.model_name(body),
        choices=choices,
        usage=usage_of([output]),
        prompt_logprobs=None if scores is None else prompt_logprobs(service, scores),
    )


async def stream_chat(
    service: Service, body: ChatRequest, request: Request, id: str
) -> AsyncGenerator[str, None]:
    """Yield the same in chunks, each with one choice: first the role, then the content, and in the
    last the finish reason.
    """
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
                    logprobs=chat_logprobs(service, body, delta.logprobs),
                )
                yield chunk(choice).model_dump_json()
    if body.wants_usage:
        yield chunk().model_copy(update={"usage": usage_of([output])}).model_dump_json()


def chat_logprobs(
    service: Service, body: ChatRequest, scores: Sequence[Logprob]
) -> ChatLogprobs | None:
    if not body.logprobs:
        return None

    def entry(id: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(
            token=service.token_text(id), logprob=logprob, bytes=list(service.token_bytes(id))
        )

    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                **dict(entry(score.id, score.logprob)),
                top_logprobs=[entry(*each) for each in score.top],
            )
            for score in scores
        ]
    )
