"""`POST /v1/completions`: the model continues a text.
https://platform.openai.com/docs/api-reference/completions"""

import codecs
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from shardwise.serve.api.requests import CompletionRequest
from shardwise.serve.api.responses import Completion, CompletionChoice, CompletionLogprobs
from shardwise.serve.api.service import Service, prompt_logprobs, usage_of
from shardwise.serve.request import Delta, Logprob, Request, RequestOutput


async def completion_requests(service: Service, body: CompletionRequest) -> list[Request]:
    """Return a request of the engine for each prompt."""
    service.model_name(body)
    params = body.params()
    requests = []
    for prompt in body.prompt:
        tokens = await service.prompt_tokens(prompt, body.add_special_tokens is not False)
        requests.append(service.request(tokens, params, body))
    return requests


async def completion_deltas(
    service: Service, body: CompletionRequest, requests: Sequence[Request]
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield (number of the prompt, delta). If only the echo is requested (max_tokens is 0), deltas
    come without what the model has generated.
    """
    async with aclosing(service.deltas(requests)) as deltas:
        async for number, delta in deltas:
            if body.max_tokens == 0:
                reason = delta.finish_reason and "length"
                delta = replace(
                    delta, text="", tokens=(), logprobs=(), finish_reason=reason, stop_reason=None
                )
            yield number, delta


def echo_of(service: Service, body: CompletionRequest, number: int) -> str:
    """Return the text of prompt `number` if prompts are echoed, else nothing."""
    if not body.echo:
        return ""
    prompt = body.prompt[number]
    if isinstance(prompt, str):
        return prompt
    return service.tokenizer.decode(prompt, skip_special=False)


async def complete(
    service: Service, body: CompletionRequest, requests: Sequence[Request], id: str
) -> Completion:
    """Return all completions in one object; those of prompt i are choices i * n and on."""
    outputs = [RequestOutput.empty(request) for request in requests]
    async with aclosing(completion_deltas(service, body, requests)) as deltas:
        async for number, delta in deltas:
            outputs[number].add(delta)
    choices = []
    for number, output in enumerate(outputs):
        scores = output.prompt_logprobs
        for completion in output.outputs:
            choice = CompletionChoice(
                index=number * len(output.outputs) + completion.index,
                text=echo_of(service, body, number) + completion.text,
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
            )
            if body.logprobs is not None:
                table = LogprobTable(service)
                if body.echo:
                    table.add_prompt(output.prompt_token_ids, scores or ())
                table.add(completion.logprobs)
                choice.logprobs = table.take()
            if body.prompt_logprobs is not None and scores is not None:
                choice.prompt_logprobs = prompt_logprobs(service, scores)
            choices.append(choice)
    model = service.model_name(body)
    return Completion(id=id, model=model, choices=choices, usage=usage_of(outputs))


async def stream_completion(
    service: Service, body: CompletionRequest, requests: Sequence[Request], id: str
) -> AsyncGenerator[str, None]:
    """Yield the same in chunks, each an object with one choice; the echo comes with the first chunk
    of its choice.
    """
    outputs = [RequestOutput.empty(request) for request in requests]
    tables: dict[int, LogprobTable] = {}
    chunk = Completion(id=id, model=service.model_name(body), choices=[])
    async with aclosing(completion_deltas(service, body, requests)) as deltas:
        async for number, delta in deltas:
            output = outputs[number]
            output.add(delta)
            index = number * len(output.outputs) + delta.index
            is_first = index not in tables
            table = tables.setdefault(index, LogprobTable(service))
            echo = echo_of(service, body, number) if is_first else ""
            if body.logprobs is not None:
                if is_first and body.echo:
                    table.add_prompt(output.prompt_token_ids, delta.prompt_logprobs or ())
                table.add(delta.logprobs)
            if not (echo or delta.text or delta.finish_reason or delta.logprobs):
                continue
            choice = CompletionChoice(
                index=index,
                text=echo + delta.text,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                logprobs=None if body.logprobs is None else table.take(),
            )
            yield chunk.model_copy(update={"choices": [choice]}).model_dump_json()
    if body.wants_usage:
        yield chunk.model_copy(update={"usage": usage_of(outputs)}).model_dump_json()


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
