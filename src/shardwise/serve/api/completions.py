"""`POST /v1/completions`: a text is gone on with.
https://platform.openai.com/docs/api-reference/completions"""

import codecs
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from shardwise.serve.api.requests import CompletionRequest
from shardwise.serve.api.responses import Completion, CompletionChoice, CompletionLogprobs
from shardwise.serve.api.service import Choice, Counts, Service, prompt_logprobs
from shardwise.serve.request import Ask, Logprob, Piece


@dataclass(frozen=True)
class Completing:
    """A request that was understood: a prompt each has an `Ask` and, if it is echoed, a text."""

    id: str
    model: str
    body: CompletionRequest
    asks: Sequence[Ask]
    echoes: Sequence[str]

    @property
    def num_answers(self) -> int:
        return self.body.n or 1


async def understand(service: Service, body: CompletionRequest, request_id: str) -> Completing:
    model = service.model_name(body)
    params = body.params()
    asks = []
    echoes = []
    for prompt in body.prompt:
        tokens = await service.prompt_tokens(prompt, body.add_special_tokens is not False)
        asks.append(service.ask(tokens, params, body))
        text = (
            prompt
            if isinstance(prompt, str)
            else service.tokenizer.decode(prompt, skip_special=False)
        )
        echoes.append(text if body.echo else "")
    return Completing(f"cmpl-{request_id}", model, body, asks, echoes)


async def pieces_of(
    service: Service, request: Completing
) -> AsyncGenerator[tuple[int, Piece], None]:
    """The engine's pieces; of a request that wants the echo alone (max_tokens is 0), without what
    the model went on."""
    async with aclosing(service.pieces(request.asks)) as pieces:
        async for number, piece in pieces:
            if request.body.max_tokens == 0:
                ended = piece.finish_reason and "length"
                piece = replace(
                    piece, text="", tokens=(), logprobs=(), finish_reason=ended, stopped_by=None
                )
            yield number, piece


async def complete(service: Service, request: Completing) -> Completion:
    """The answers in one object; those to prompt i are choices i * n and on."""
    counts = Counts(request.asks)
    n = request.num_answers
    answers = [Choice() for _ in range(len(request.asks) * n)]
    scores: dict[int, Sequence[Logprob]] = {}
    async with aclosing(pieces_of(service, request)) as pieces:
        async for number, piece in pieces:
            counts.add(number, piece)
            answers[number * n + piece.index].add(piece)
            if piece.prompt is not None:
                scores[number] = piece.prompt
    choices = []
    for index, answer in enumerate(answers):
        number = index // n
        choice = CompletionChoice(
            index=index,
            text=request.echoes[number] + answer.text,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stopped_by,
        )
        if request.body.logprobs is not None:
            table = LogprobTable(service)
            if request.body.echo:
                table.add_prompt(request.asks[number].tokens, scores.get(number, ()))
            table.add(answer.logprobs)
            choice.logprobs = table.take()
        if request.body.prompt_logprobs is not None and number in scores:
            choice.prompt_logprobs = prompt_logprobs(service, scores[number])
        choices.append(choice)
    return Completion(id=request.id, model=request.model, choices=choices, usage=counts.usage())


async def stream_completion(service: Service, request: Completing) -> AsyncGenerator[str, None]:
    """The same in chunks, each an object with one choice; an echo comes with the first of its
    choice."""
    counts = Counts(request.asks)
    n = request.num_answers
    tables: dict[int, LogprobTable] = {}
    chunk = Completion(id=request.id, model=request.model, choices=[])
    async with aclosing(pieces_of(service, request)) as pieces:
        async for number, piece in pieces:
            counts.add(number, piece)
            index = number * n + piece.index
            is_first = index not in tables
            table = tables.setdefault(index, LogprobTable(service))
            echo = request.echoes[number] if is_first else ""
            if request.body.logprobs is not None:
                if is_first and request.body.echo:
                    table.add_prompt(request.asks[number].tokens, piece.prompt or ())
                table.add(piece.logprobs)
            if not (echo or piece.text or piece.finish_reason or piece.logprobs):
                continue
            choice = CompletionChoice(
                index=index,
                text=echo + piece.text,
                finish_reason=piece.finish_reason,
                stop_reason=piece.stopped_by,
                logprobs=None if request.body.logprobs is None else table.take(),
            )
            yield chunk.model_copy(update={"choices": [choice]}).model_dump_json()
    if request.body.wants_usage:
        yield chunk.model_copy(update={"usage": counts.usage()}).model_dump_json()


class LogprobTable:
    """Log-probabilities of one choice in OpenAI's older form: lists side by side, with where each
    token begins."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.found = CompletionLogprobs()
        self.offset = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add_prompt(self, tokens: Sequence[int], scores: Sequence[Logprob]) -> None:
        """The first token of a prompt has no probability, since nothing precedes it."""
        self.place(tokens[0])
        self.found.token_logprobs.append(None)
        self.found.top_logprobs.append(None)
        self.add(scores)

    def add(self, scores: Sequence[Logprob]) -> None:
        for score in scores:
            self.place(score.id)
            self.found.token_logprobs.append(score.logprob)
            top: dict[str, float] = {}
            for id, logprob in (*score.top, (score.id, score.logprob)):
                top.setdefault(self.service.token_text(id), logprob)
            self.found.top_logprobs.append(top)

    def place(self, id: int) -> None:
        self.found.tokens.append(self.service.token_text(id))
        self.found.text_offset.append(self.offset)
        if id not in self.service.tokenizer.special_ids:
            self.offset += len(self.decoder.decode(self.service.token_bytes(id)))

    def take(self) -> CompletionLogprobs:
        """What came since it was last asked for."""
        found = self.found
        self.found = CompletionLogprobs()
        return found
