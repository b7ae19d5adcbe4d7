"""`POST /v1/chat/completions`: messages are answered.
https://platform.openai.com/docs/api-reference/chat"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

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
from shardwise.serve.api.service import Choice, Counts, Service, prompt_logprobs
from shardwise.serve.request import Ask, Logprob


@dataclass(frozen=True)
class Chatting:
    """A request that was understood."""

    id: str
    model: str
    body: ChatRequest
    ask: Ask

    @property
    def num_answers(self) -> int:
        return self.body.n or 1


async def understand(service: Service, body: ChatRequest, request_id: str) -> Chatting:
    model = service.model_name(body)
    params = body.params()
    ask = service.ask(await service.chat_tokens(body), params, body)
    return Chatting(f"chatcmpl-{request_id}", model, body, ask)


async def chat(service: Service, request: Chatting) -> Chat:
    """The answers in one object."""
    counts = Counts([request.ask])
    answers = [Choice() for _ in range(request.num_answers)]
    scores = None
    async with aclosing(service.pieces([request.ask])) as pieces:
        async for number, piece in pieces:
            counts.add(number, piece)
            answers[piece.index].add(piece)
            if piece.prompt is not None:
                scores = prompt_logprobs(service, piece.prompt)
    choices = [
        ChatChoice(
            index=index,
            message=ChatMessage(content=answer.text),
            finish_reason=answer.finish_reason or "length",
            stop_reason=answer.stopped_by,
            logprobs=logprobs(service, request, answer.logprobs),
        )
        for index, answer in enumerate(answers)
    ]
    return Chat(
        id=request.id,
        model=request.model,
        choices=choices,
        usage=counts.usage(),
        prompt_logprobs=scores,
    )


async def stream_chat(service: Service, request: Chatting) -> AsyncGenerator[str, None]:
    """The same in chunks, each with one choice: first who speaks, then what is said, in the last
    why it ended."""
    counts = Counts([request.ask])
    created = now_s()
    begun = set[int]()

    def chunk(*choices: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(id=request.id, created=created, model=request.model, choices=list(choices))

    async with aclosing(service.pieces([request.ask])) as pieces:
        async for number, piece in pieces:
            counts.add(number, piece)
            if piece.index not in begun:
                begun.add(piece.index)
                role = ChatDelta(role="assistant", content="")
                yield chunk(ChatChunkChoice(index=piece.index, delta=role)).model_dump_json()
            if piece.text or piece.finish_reason or piece.logprobs:
                yield chunk(
                    ChatChunkChoice(
                        index=piece.index,
                        delta=ChatDelta(content=piece.text or None),
                        finish_reason=piece.finish_reason,
                        stop_reason=piece.stopped_by,
                        logprobs=logprobs(service, request, piece.logprobs),
                    )
                ).model_dump_json()
    if request.body.wants_usage:
        yield chunk().model_copy(update={"usage": counts.usage()}).model_dump_json()


def logprobs(service: Service, request: Chatting, scores: Sequence[Logprob]) -> ChatLogprobs | None:
    if not request.body.logprobs:
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
