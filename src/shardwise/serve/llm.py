"""A model without a server: `LLM(model).generate(prompts)`, with the interface of vLLM's `LLM`."""

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.formats.catalogue import find_model, model_path
from shardwise.parallel.launch import Place, device_of
from shardwise.serve.engine.worker import make_engine, start_rank
from shardwise.serve.request import CompletionOutput, Delta, Request, RequestOutput, SamplingParams
from shardwise.serve.settings import EngineSettings

__all__ = ["LLM", "CompletionOutput", "RequestOutput"]

Prompt = str | Sequence[int]
Message = dict[str, str]


class LLM:
    """A model in this process.

    `model` is a folder, a .gguf file, a run or a hub id; `settings` are the fields of
    `EngineSettings`: dtype, quant, kv_dtype, kv_bytes, max_len, max_batch_tokens, max_running.
    Raises ValueError for what does not fit, with what does.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.settings = EngineSettings(model_path(find_model(model)), **settings)
        if self.settings.layout.world_size > 1:
            raise ValueError("LLM runs on one device; `shardwise serve --tp N` serves over several")
        started = start_rank(Place(0, 1, device_of(0, 1)), self.settings)
        self.engine = make_engine(started, self.settings)
        self.next_id = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts, batched as memory allows, and return the outputs in their order.

        `params` are for all prompts or one per prompt; `use_tqdm` shows progress on a terminal.
        """
        prompt_list = as_list(prompts)
        with Progress(
            TextColumn("[bold]generate"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            disable=not use_tqdm,
        ) as progress:
            task = progress.add_task("generate", total=len(prompt_list))
            outputs: dict[int, RequestOutput] = {}
            for output, _ in self.stream(prompt_list, params):
                outputs[output.request_id] = output
                if output.finished:
                    progress.advance(task)
        return [outputs[request_id] for request_id in sorted(outputs)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one conversation or several, in the model's chat template."""
        several = [messages] if messages and isinstance(messages[0], dict) else messages
        tokenizer = self.engine.tokenizer
        prompts = [tokenizer.encode(tokenizer.chat(list(each))) for each in several]  # type: ignore[arg-type]
        return self.generate(prompts, params, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[tuple[RequestOutput, Delta]]:
        """Yield each delta as it comes, with the output of its prompt so far. Closing the iterator
        aborts what still runs.
        """
        engine = self.engine
        outputs = dict[int, RequestOutput]()
        if engine.has_work or engine.compiling:
            raise ValueError(
                "another stream of this LLM is running; it must end, or be closed, before the next"
            )
        pending = self.requests(as_list(prompts), params)
        for request, _ in pending:
            engine.check(request)
        pending.reverse()
        try:
            while pending or engine.has_work or engine.compiling:
                while pending and engine.num_waiting < self.settings.max_queued:
                    request, text = pending.pop()
                    outputs[request.request_id] = RequestOutput.empty(request, text)
                    engine.add(request)
                self.start_compiled()
                for delta in engine.step():
                    output = outputs[delta.request_id]
                    output.add(delta)
                    yield output, delta
        finally:
            for request_id in outputs:
                engine.abort(request_id)

    def requests(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[Request, str | None]]:
        """Return a request for each prompt, and its text if it was given as text."""
        if not isinstance(params, Sequence):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"{len(params)} parameters for {len(prompts)} prompts; give one for each, or one "
                "for all"
            )
        requests = []
        for prompt, prompt_params in zip(prompts, params, strict=True):
            text = prompt if isinstance(prompt, str) else None
            tokens = prompt
            if isinstance(prompt, str):
                tokens = self.engine.tokenizer.encode(prompt, special_tokens=True)
            request = Request(tuple(tokens), prompt_params, request_id=self.next_id)  # type: ignore[arg-type]
            self.next_id += 1
            requests.append((request, text))
        return requests

    def start_compiled(self) -> None:
        """Queue requests whose grammar has been compiled, if all fit into the queue; wait for one
        if there is nothing else to do.
        """
        engine = self.engine
        if not engine.has_work:
            grammars = [grammar for _, grammar in engine.compiling.values()]
            wait(grammars, return_when=FIRST_COMPLETED)
        if engine.num_waiting <= self.settings.max_queued:
            for _, error in engine.start_compiled():
                raise error


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return prompts as a list; one prompt, as text or ids, is a list of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
