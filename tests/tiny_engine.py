"""An engine client without a process: the real engine around a random model. A coroutine that waits
for a delta steps it, and a test can stop all steps.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.config import ModelConfig
from shardwise.formats.huggingface.hf_config import from_hugging_face
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.layout import Layout
from shardwise.parallel.mesh import make_mesh
from shardwise.serve.engine.engine import Engine
from shardwise.serve.engine.pages import Pages
from shardwise.serve.engine.runner import Logits, PromptLogprobs, Runner
from shardwise.serve.engine.scheduler import Limits, Scheduler
from shardwise.serve.engine.sequence import Batch
from shardwise.serve.engine_client import EngineDied, Stats
from shardwise.serve.request import Delta, Request
from tiny_models import our_weights, tiny_model

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'wizard' %}{{ raise_exception('no wizards "
    "here') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt "
    "%}assistant: {% endif %}"
)
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
"""A template, or a part of one, that does not end in hours."""
NUM_PAGES = 128
PAGE_TOKENS = 16
MAX_LEN = 256


@dataclass(frozen=True)
class TinyModel:
    """The same model in transformers and in Shardwise."""

    theirs: PreTrainedModel
    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer


def talking_model() -> TinyModel:
    """Return a random model over bytes, with a chat template."""
    theirs = tiny_model("llama", vocab_size=264, max_position_embeddings=MAX_LEN)
    tokenizer = replace(byte_tokenizer(), chat_template=TEMPLATE)
    return TinyModel(
        theirs, from_hugging_face(theirs.config.to_dict()), our_weights(theirs), tokenizer
    )


class FragileRunner(Runner):
    """A runner whose logits are NaN from position `fails_at` on."""

    fails_at: int | None = None

    def run(self, batch: Batch) -> tuple[Logits, PromptLogprobs]:
        logits, prompt_logprobs = super().run(batch)
        for entry in batch.entries:
            end = entry.start + len(entry.tokens)
            if self.fails_at is not None and end > self.fails_at and entry.id in logits:
                logits[entry.id] = logits[entry.id] * torch.nan
        return logits, prompt_logprobs

    def keep_alive(self) -> None:
        pass


class TinyEngine:
    """Steps wait for `may_step`; `death` is the message of EngineDied; `queue` is the length of the
    queue.
    """

    def __init__(self, model: TinyModel, queue: int = 64) -> None:
        self.tokenizer = model.tokenizer
        self.config = model.config
        self.max_len = MAX_LEN
        self.vocab_size = model.config.vocab_size
        mesh = make_mesh(Layout(), 0, torch.device("cpu"), model.config.num_kv_heads)
        self.runner = FragileRunner(
            model.config, dict(model.weights), mesh, torch.float32, PAGE_TOKENS
        )
        self.runner.make_pages(NUM_PAGES)
        self.scheduler = Scheduler(Pages(NUM_PAGES, PAGE_TOKENS), Limits(64, 16, queue), MAX_LEN)
        self.engine = Engine(model.config, model.tokenizer, self.runner, self.scheduler)
        self.request_ids = count()
        self.deltas: dict[int, list[Delta | Exception]] = {}
        self.may_step = asyncio.Event()
        self.may_step.set()
        self.asked: list[Request] = []
        self.death: str | None = None
        self.is_closed = False
        self.is_running = True
        self.lost = asyncio.Event()

    @property
    def num_running(self) -> int:
        return len(self.engine.requests)

    def check(self) -> None:
        if self.death:
            raise EngineDied(self.death)

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        self.check()
        request_id = next(self.request_ids)
        self.engine.add(replace(request, request_id=request_id))
        self.asked.append(request)
        self.deltas[request_id] = []
        left = request.params.n
        try:
            while left:
                while not self.deltas[request_id]:
                    await asyncio.sleep(0)
                    await self.may_step.wait()
                    self.step()
                delta = self.deltas[request_id].pop(0)
                if isinstance(delta, Exception):
                    raise delta
                left -= delta.finish_reason is not None
                yield delta
        finally:
            del self.deltas[request_id]
            self.engine.abort(request_id)

    def step(self) -> None:
        self.check()
        for request_id, error in self.engine.start_compiled():
            if request_id in self.deltas:
                self.deltas[request_id].append(error)
        for delta in self.engine.step():
            if delta.request_id in self.deltas:
                self.deltas[delta.request_id].append(delta)

    async def embed(self, tokens: Sequence[int]) -> list[float]:
        self.check()
        return self.engine.embed([list(tokens)])[0]

    async def stats(self) -> Stats:
        self.check()
        self.scheduler.pages.audit([sequence.pages for sequence in self.scheduler.running])
        return self.engine.stats()

    async def close(self) -> None:
        """Fail all pending requests."""
        self.is_closed = True
        for waiting in self.deltas.values():
            waiting.append(EngineDied("the server is shutting down"))
        self.may_step.set()
