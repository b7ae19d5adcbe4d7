"""`POST /v1/completions`: continue a text.
https://platform.openai.com/docs/api-reference/completions"""

import codecs
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from shardwise.serve.api.requests import CompletionRequest
from shardwise.serve.api.responses import Completion, CompletionChoice, CompletionLogprobs
from shardwise.serve.api.service import Service, count_usage, format_prompt_logprobs
from shardwise.serve.request import CompletionOutput, Delta, Logprob, Request, RequestOutput


async def completion_requests(service: Service, body: CompletionRequest) -> list[Request]:
    """Return the engine's request for each prompt.

    Raises ValueError, or ApiError for an unknown model, if the body cannot be served.
    """
    service.model_name(body)
    params = body.params(service.settings.default_params)
    requests = []
    for prompt in body.prompt:
        tokens = await service.prompt_tokens(prompt, body.add_special_tokens is not False)
        requests.append(service.make_request(tokens, params, body))
    return requests


async def completion_deltas(
    service: Service, body: CompletionRequest, requests: Sequence[Request]
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield (index of the prompt, delta).

    The engine generates at least one token; if only the echo is requested (max_tokens is 0), deltas
    come without it.
    """
    async with aclosing(service.deltas(requests)) as deltas:
        async for index, delta in deltas:
            if body.max_tokens == 0:
                reason = delta.finish_reason and "length"
                delta = replace(
                    delta, text="", tokens=(), logprobs=(), finish_reason=reason, stop_reason=None
                )
            yield index, delta


def echo_of(service: Service, body: CompletionRequest, index: int) -> str:
    """Return the text of prompt `index` if prompts are echoed, else nothing."""
    if not body.echo:
        return ""
    prompt = body.prompt[index]
    if isinstance(prompt, str):
        return prompt
    return service.tokenizer.decode(prompt, skip_special=False)


async def complete(
    service: Service, body: CompletionRequest, requests: Sequence[Request], id: str
) -> Completion:
    """Return all completions in one object; prompt i has the choices from i * n on."""
    outputs = [RequestOutput.empty(request) for request in requests]
    async with aclosing(completion_deltas(service, body, requests)) as deltas:
        async for index, delta in deltas:
            outputs[index].add(delta)
    choices = [
        make_choice(service, body, index, output, completion)
        for index, output in enumerate(outputs)
        for completion in output.outputs
    ]
    model = service.model_name(body)
    return Completion(id=id, model=model, choices=choices, usage=count_usage(outputs))


def make_choice(
    service: Service,
    body: CompletionRequest,
    index: int,
    output: RequestOutput,
    completion: CompletionOutput,
) -> CompletionChoice:
    """Return a completion of prompt `index` in the format of the API."""
    choice = CompletionChoice(
        index=index * len(output.outputs) + completion.index,
        text=echo_of(service, body, index) + completion.text,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )
    if body.logprobs is not None:
        table = LogprobTable(service)
        if body.echo:
            table.add_prompt(output.prompt_token_ids, output.prompt_logprobs or ())
        table.add(completion.logprobs)
        choice.logprobs = table.take()
    if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
        choice.prompt_logprobs = format_prompt_logprobs(service, output.prompt_logprobs)
    return choice


async def stream_completion(
    service: Service, body: CompletionRequest, requests: Sequence[Request], id: str
) -> AsyncGenerator[str, None]:
    """Yield chunks, each an object with one choice; the first chunk of a choice has the echo."""
    outputs = [RequestOutput.empty(request) for request in requests]
    tables: dict[int, LogprobTable] = {}
    chunk = Completion(id=id, model=service.model_name(body), choices=[])
    async with aclosing(completion_deltas(service, body, requests)) as deltas:
        async for index, delta in deltas:
            output = outputs[index]
            output.add(delta)
            choice_index = index * len(output.outputs) + delta.index
            is_first = choice_index not in tables
            table = tables.setdefault(choice_index, LogprobTable(service))
            echo = echo_of(service, body, index) if is_first else ""
            if body.logprobs is not None:
                if is_first and body.echo:
                    table.add_prompt(output.prompt_token_ids, delta.prompt_logprobs or ())
                table.add(delta.logprobs)
            if not (echo or delta.text or delta.finish_reason or delta.logprobs):
                continue
            choice = CompletionChoice(
                index=choice_index,
                text=echo + delta.text,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                logprobs=None if body.logprobs is None else table.take(),
            )
            yield chunk.model_copy(update={"choices": [choice]}).model_dump_json()
    if body.wants_usage:
        yield chunk.model_copy(update={"usage": count_usage(outputs)}).model_dump_json()


class LogprobTable:
    """Log-probabilities of one choice in the format of the completions API: parallel lists, with
    the offset of each token in the text.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.entries = CompletionLogprobs()
        self.offset = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add_prompt(self, tokens: Sequence[int], logprobs: Sequence[Logprob]) -> None:
        """Add a prompt; its first token has no probability, because nothing precedes it."""
        self.add_token(tokens[0])
        self.entries.token_logprobs.append(None)
        self.entries.top_logprobs.append(None)
        self.add(logprobs)

    def add(self, logprobs: Sequence[Logprob]) -> None:
        for token in logprobs:
            self.add_token(token.id)
            self.entries.token_logprobs.append(token.logprob)
            top: dict[str, float] = {}
            for id, logprob in (*token.top, (token.id, token.logprob)):
                top.setdefault(self.service.token_text(id), logprob)
            self.entries.top_logprobs.append(top)

    def add_token(self, id: int) -> None:
        self.entries.tokens.append(self.service.token_text(id))
        self.entries.text_offset.append(self.offset)
        if id not in self.service.tokenizer.special_ids:
            self.offset += len(self.decoder.decode(self.service.token_bytes(id)))

    def take(self) -> CompletionLogprobs:
        """Return the entries since the last call."""
        entries = self.entries
        self.entries = CompletionLogprobs()
        return entries
