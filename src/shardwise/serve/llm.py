"""A model without a server: `LLM(model).generate(prompts)`, with the interface of vLLM's `LLM`."""

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.formats.catalogue import find_model, model_source
from shardwise.formats.model_source import source_path
from shardwise.formats.open_model import open_model
from shardwise.parallel.launch import Place, device_of
from shardwise.serve.default_params import default_params
from shardwise.serve.engine.worker import make_engine, start_rank
from shardwise.serve.keywords import settings_of_keywords
from shardwise.serve.request import CompletionOutput, Delta, Request, RequestOutput, SamplingParams
from shardwise.serve.settings import EngineSettings

__all__ = ["LLM", "CompletionOutput", "RequestOutput"]

Prompt = str | Sequence[int] | dict[str, Any]
Message = dict[str, str]


class LLM:
    """A model in this process.

    `model` is a folder, a .gguf file, a run or a hub id. `settings` are the fields of
    `EngineSettings`, under their own names or vLLM's (`keywords.py`). With `seed`, requests that
    have no seed of their own are reproducible. Raises ValueError for what does not fit, with what
    does, and for unknown settings.
    """

    def __init__(self, model: str, *, seed: int | None = None, **settings: Any) -> None:
        opened = open_model(model_source(find_model(model)))
        path = source_path(opened.source)
        self.settings = EngineSettings(path, **settings_of_keywords(settings))
        self.seed = seed
        if self.settings.layout.world_size > 1:
            raise ValueError("LLM runs on one device; `shardwise serve --tp N` serves over several")
        self.default_params = default_params(opened.source, self.settings.generation_config)
        started = start_rank(Place(0, 1, device_of(0, 1)), self.settings, opened=opened)
        self.engine = make_engine(started, self.settings)
        self.next_id = 0

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of prompts without any: those of the model's
        `generation_config.json`."""
        return self.default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts, batched as memory allows, and return the outputs in their order.

        A prompt is a text, token ids, or a dictionary with `prompt` or `prompt_token_ids`; ids may
        also be given as `prompt_token_ids`. `sampling_params` are for all prompts or one per
        prompt; `use_tqdm` shows progress on stderr.
        """
        if (prompts is None) == (prompt_token_ids is None):
            raise ValueError("give prompts or prompt_token_ids, one of them")
        given: Any = prompt_token_ids if prompts is None else prompts
        return self._complete(as_list(given), sampling_params, use_tqdm)

    def _complete(
        self,
        prompt_list: list[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        starts_text: bool = False,
    ) -> list[RequestOutput]:
        with Progress(
            TextColumn("[bold]generate"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not use_tqdm,
        ) as progress:
            task = progress.add_task("generate", total=len(prompt_list))
            outputs: dict[int, RequestOutput] = {}
            for output, _ in self.stream(prompt_list, sampling_params, starts_text):
                outputs[output.request_id] = output
                if output.finished:
                    progress.advance(task)
        return [outputs[request_id] for request_id in sorted(outputs)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one conversation or several, in the model's chat template."""
        several = [messages] if messages and isinstance(messages[0], dict) else messages
        tokenizer = self.engine.tokenizer
        prompts = [tokenizer.encode(tokenizer.chat(list(each))) for each in several]  # type: ignore[arg-type]
        return self._complete(as_list(prompts), sampling_params, use_tqdm, starts_text=True)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        starts_text: bool = False,
    ) -> Iterator[tuple[RequestOutput, Delta]]:
        """Yield each delta as it comes, with the output of its prompt so far. Closing the iterator
        aborts what still runs. For `starts_text` see `Request`.
        """
        engine = self.engine
        outputs = dict[int, RequestOutput]()
        if engine.has_work or engine.compiling:
            raise ValueError(
                "another stream of this LLM is running; it must end, or be closed, before the next"
            )
        pending = self.requests(as_list(prompts), sampling_params, starts_text)
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
        self,
        prompts: list[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        starts_text: bool,
    ) -> list[tuple[Request, str | None]]:
        """Return a request for each prompt, and its text if it was given as text."""
        if not isinstance(params, Sequence):
            params = [params or self.default_params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"{len(params)} parameters for {len(prompts)} prompts; give one for each, or one "
                "for all"
            )
        requests = []
        for prompt, prompt_params in zip(prompts, params, strict=True):
            if self.seed is not None and prompt_params.seed is None:
                prompt_params = replace(prompt_params, seed=self.seed + self.next_id)
            text = prompt if isinstance(prompt, str) else None
            ids: Sequence[int] = (
                self.engine.tokenizer.encode(prompt, special_tokens=True)
                if isinstance(prompt, str)
                else prompt
            )
            request = Request(
                tuple(ids), prompt_params, request_id=self.next_id, starts_text=starts_text
            )
            requests.append((request, text))
            self.next_id += 1
        return requests

    def start_compiled(self) -> None:
        """Queue requests whose grammar has been compiled, if all fit into the queue; wait for one
        if there is nothing else to do.
        """
        engine = self.engine
        if not engine.has_work:
            grammars = [grammar for _, grammar, _ in engine.compiling.values()]
            wait(grammars, return_when=FIRST_COMPLETED)
        if engine.num_waiting <= self.settings.max_queued:
            for _, error in engine.start_compiled():
                raise error


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[str | Sequence[int]]:
    """Return prompts as a list; one prompt, as text, ids or a dictionary, is a list of one."""
    is_one = isinstance(prompts, str | dict) or (prompts and isinstance(prompts[0], int))
    return [content(each) for each in ([prompts] if is_one else prompts)]  # type: ignore[arg-type]


def content(prompt: Prompt) -> str | Sequence[int]:
    """Return the text or the token ids of a prompt. Raises ValueError for other keys than vLLM's
    `prompt` and `prompt_token_ids`."""
    if not isinstance(prompt, dict):
        return prompt
    for key in ("prompt_token_ids", "prompt"):
        if set(prompt) == {key}:
            value: str | Sequence[int] = prompt[key]
            return value
    raise ValueError(
        f"a prompt has the key prompt or prompt_token_ids, one of them, not {', '.join(prompt)}"
    )
