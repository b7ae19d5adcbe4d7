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
from shardwise.serve.sampling.detokenize import context_of, is_byte_token


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
        prompt = output.prompt_token_ids
        table = LogprobTable(service, body, prompt, echo_of(service, body, index))
        if body.echo:
            offsets = prompt_offsets(service, body, index, prompt)
            table.add_prompt(output.prompt_logprobs or (), offsets)
        table.add_completion(completion.logprobs)
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
            echo = echo_of(service, body, index) if is_first else ""
            prompt = output.prompt_token_ids
            if is_first:
                tables[choice_index] = LogprobTable(service, body, prompt, echo)
            table = tables[choice_index]
            if body.logprobs is not None:
                if is_first and body.echo:
                    offsets = prompt_offsets(service, body, index, prompt)
                    table.add_prompt(output.prompt_logprobs or (), offsets)
                table.add_completion(delta.logprobs)
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
    the offset of each token in the text of the choice. Special tokens of a completion that are not
    shown have length 0.
    """

    def __init__(
        self, service: Service, body: CompletionRequest, prompt: Sequence[int], echo: str
    ) -> None:
        self.service = service
        self.prompt = prompt
        self.entries = CompletionLogprobs()
        shows_special = body.skip_special_tokens is False
        self.skipped = frozenset() if shows_special else service.tokenizer.special_ids
        starts_text = not context_of(service.tokenizer, prompt, self.skipped)
        self.offset = TextOffset(service, len(echo), starts_text)

    def add_prompt(self, logprobs: Sequence[Logprob], offsets: Sequence[int]) -> None:
        """Add the prompt, whose tokens are at `offsets`; its first token has no probability,
        because nothing precedes it."""
        self.entries.tokens.append(self.service.token_text(self.prompt[0]))
        self.entries.token_logprobs.append(None)
        self.entries.top_logprobs.append(None)
        for token in logprobs:
            self.add(token)
        self.entries.text_offset += offsets[: 1 + len(logprobs)]

    def add_completion(self, logprobs: Sequence[Logprob]) -> None:
        for token in logprobs:
            is_shown = token.id not in self.skipped
            self.entries.text_offset.append(self.offset.next(token.id, is_shown))
            self.add(token)

    def add(self, token: Logprob) -> None:
        self.entries.tokens.append(self.service.token_text(token.id))
        self.entries.token_logprobs.append(token.logprob)
        top: dict[str, float] = {}
        for id, logprob in (*token.top, (token.id, token.logprob)):
            top.setdefault(self.service.token_text(id), logprob)
        self.entries.top_logprobs.append(top)

    def take(self) -> CompletionLogprobs:
        """Return the entries since the last call."""
        entries = self.entries
        self.entries = CompletionLogprobs()
        return entries


class TextOffset:
    """The offset of each token in a text, one token after another. The first token of a text has
    no leading space in SentencePiece vocabularies."""

    def __init__(self, service: Service, offset: int, starts_text: bool) -> None:
        self.service = service
        self.offset = offset
        self.starts_text = starts_text
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, id: int, is_shown: bool = True) -> int:
        """Return the offset of the next token, which is that of the one after it if it is not
        shown."""
        offset = self.offset
        if is_shown:
            self.offset += self.length(id)
            self.starts_text = False
        return offset

    def length(self, id: int) -> int:
        num_characters = len(self.decoder.decode(self.service.token_bytes(id)))
        tokenizer = self.service.tokenizer
        token = tokenizer.backend.id_to_token(id) or ""
        if self.starts_text and not tokenizer.is_byte_level and not is_byte_token(token):
            return len(tokenizer.decode([id], skip_special=False))
        return num_characters


def prompt_offsets(
    service: Service, body: CompletionRequest, index: int, tokens: Sequence[int]
) -> list[int]:
    """Return where each token of prompt `index` is in its echo."""
    prompt = body.prompt[index]
    offset = TextOffset(service, 0, starts_text=True)
    if not isinstance(prompt, str):
        return [offset.next(id) for id in tokens]
    tokenizer = service.tokenizer
    special_tokens = body.add_special_tokens is not False
    num_before, num_after = tokenizer.num_added(tokens) if special_tokens else (0, 0)
    end = len(tokens) - num_after
    if tokenizer.decode(tokens[num_before:end], skip_special=False) == prompt:
        shown = range(num_before, end)
        return [offset.next(id, position in shown) for position, id in enumerate(tokens)]
    # a normalizer changed the text: NFC, or a space after a control token
    return tokenizer.offsets(prompt, special_tokens)
