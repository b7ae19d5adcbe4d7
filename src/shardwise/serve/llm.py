"""A model without a server: `LLM(model).generate(prompts)`, in the shape that vLLM's users know."""

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.formats.catalogue import find_model, model_path
from shardwise.parallel.launch import Place, device_of
from shardwise.serve.engine.worker import lead, start
from shardwise.serve.request import Ask, Logprob, Piece, SamplingParams
from shardwise.serve.settings import EngineSettings

Prompt = str | Sequence[int]
Message = dict[str, str]


@dataclass
class CompletionOutput:
    """One of the n answers to a prompt, as far as it has got."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.token_ids += piece.tokens
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stopped_by


@dataclass
class RequestOutput:
    """A prompt and answers. `prompt` is None where ids were given; `prompt_logprobs` begin with its
    second token."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprob] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    def add(self, piece: Piece) -> None:
        self.outputs[piece.index].add(piece)
        if piece.prompt is not None:
            self.prompt_logprobs = list(piece.prompt)
        self.num_cached_tokens = max(self.num_cached_tokens, piece.num_cached_tokens)


class LLM:
    """A model in this process: a folder, a .gguf file, a run or a hub id. `settings` are those of
    `EngineSettings`: dtype, quant, kv_dtype, kv_bytes, max_len, max_batch_tokens, max_running.
    Raises ValueError for what does not fit, with what does."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.settings = EngineSettings(model_path(find_model(model)), **settings)
        if self.settings.layout.world_size > 1:
            raise ValueError("LLM runs on one device; `shardwise serve --tp N` serves over several")
        self.engine = lead(start(Place(0, 1, device_of(0, 1)), self.settings), self.settings)
        self.next_name = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer all prompts, batched as memory allows; in their order. `use_tqdm` shows progress
        on a terminal."""
        asked = as_list(prompts)
        with Progress(
            TextColumn("[bold]generate"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            disable=not use_tqdm,
        ) as progress:
            task = progress.add_task("generate", total=len(asked))
            outputs: dict[int, RequestOutput] = {}
            for output, _ in self.stream(asked, params):
                outputs[output.request_id] = output
                if output.finished:
                    progress.advance(task)
        return [outputs[name] for name in sorted(outputs)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, in the template of the model."""
        several = [messages] if messages and isinstance(messages[0], dict) else messages
        tokenizer = self.engine.tokenizer
        prompts = [tokenizer.encode(tokenizer.chat(list(each))) for each in several]  # type: ignore[arg-type]
        return self.generate(prompts, params, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[tuple[RequestOutput, Piece]]:
        """Each piece as it comes, with what its prompt has got so far. Who stops early ends what is
        under way."""
        engine = self.engine
        outputs = dict[int, RequestOutput]()
        if engine.has_work or engine.compiling:
            raise ValueError(
                "another stream of this LLM is under way; it must end, or be closed, before the next"
            )
        asked = as_list(prompts)
        each_params = (
            [params or SamplingParams()] * len(asked)
            if not isinstance(params, Sequence)
            else params
        )
        if len(each_params) != len(asked):
            raise ValueError(
                f"{len(each_params)} parameters for {len(asked)} prompts; give one for each, or one for all"
            )
        waiting = [self.ask(prompt, mine) for prompt, mine in zip(asked, each_params, strict=True)]
        for ask, _ in waiting:
            engine.check(ask)
        waiting.reverse()
        try:
            while waiting or engine.has_work or engine.compiling:
                while waiting and self.num_waiting < self.settings.max_queued:
                    ask, text = waiting.pop()
                    name = self.next_name
                    self.next_name = self.next_name + 1
                    answers = [CompletionOutput(index) for index in range(ask.params.n)]
                    outputs[name] = RequestOutput(name, text, list(ask.tokens), answers)
                    engine.add(name, ask)
                self.begin_compiled()
                for name, piece in engine.step():
                    outputs[name].add(piece)
                    yield outputs[name], piece
        finally:
            for name in outputs:
                engine.abort(name)

    @property
    def num_waiting(self) -> int:
        return len(self.engine.scheduler.waiting) + len(self.engine.compiling)

    def begin_compiled(self) -> None:
        """Queue those whose structure has been compiled, if all have room; wait for one if nothing
        else is to do."""
        engine = self.engine
        if not engine.has_work:
            wait(
                [structure for _, structure in engine.compiling.values()],
                return_when=FIRST_COMPLETED,
            )
        if self.num_waiting <= self.settings.max_queued:
            for _, error in engine.begin_compiled():
                raise error

    def ask(self, prompt: Prompt, params: SamplingParams) -> tuple[Ask, str | None]:
        text = prompt if isinstance(prompt, str) else None
        tokens = (
            self.engine.tokenizer.encode(prompt, special_tokens=True)
            if isinstance(prompt, str)
            else prompt
        )
        return Ask(tuple(tokens), params), text


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, as text or ids, is a list of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
