"""How a model is served: what an engine is started with. Imports no torch."""

from dataclasses import dataclass, field
from pathlib import Path

from shardwise.config import ModelConfig
from shardwise.formats.storage import quantized_forms
from shardwise.layout import Layout
from shardwise.precision import PRECISIONS, Precision
from shardwise.quant.kv_dtype import KvDtype, check_kv_dtype
from shardwise.quant.scheme import parse_quant
from shardwise.serve.engine.scheduler import Limits

BLOCK_TOKENS = 128
"""Attention adds up blocks of this many positions (kernels/paged.py), each of whole pages."""


@dataclass(frozen=True)
class EngineSettings:
    """kv_bytes: of keys and values on each rank; None: what memory leaves. max_len: tokens of a
    prompt and its answer; None: the model's positions. quant: what the matrices of blocks are
    rounded to, as `int4-g64`, or `as-stored`; None: plain numbers. kv_dtype: what keys and values
    are kept in; auto: dtype. The rest are the limits of a step and of the queue."""

    model: Path
    layout: Layout = field(default_factory=Layout)
    dtype: Precision = "bf16"
    kv_bytes: int | None = None
    max_len: int | None = None
    page_tokens: int = 16
    max_batch_tokens: int = 512
    max_running: int = 64
    max_queued: int = 1024
    quant: str | None = None
    kv_dtype: KvDtype = "auto"

    def __post_init__(self) -> None:
        layout = self.layout
        if layout != Layout(tp=layout.tp):
            raise ValueError(
                f"serving cuts a model over tensor ranks alone, not as {layout}; tp{layout.tp} works"
            )
        if self.dtype not in PRECISIONS:
            raise ValueError(
                f"dtype is {self.dtype}, but a model is served in {' or '.join(PRECISIONS)}"
            )
        if self.quant is not None:
            parse_quant(self.quant)
        check_kv_dtype(self.kv_dtype)
        if self.page_tokens < 1 or BLOCK_TOKENS % self.page_tokens:
            raise ValueError(
                f"page_tokens is {self.page_tokens}, but it must divide {BLOCK_TOKENS}; 16 works"
            )
        _ = self.limits
        for name, least in (("max_len", 2), ("kv_bytes", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")

    @property
    def limits(self) -> Limits:
        """Of a step and of the queue. Raises ValueError for those that do not go together."""
        return Limits(self.max_batch_tokens, self.max_running, self.max_queued)


def check_model(settings: EngineSettings, config: ModelConfig) -> None:
    """Raise ValueError, before any process is started, for what this model cannot have."""
    check_shape(settings, config)
    if settings.quant is not None:
        quantized_forms(settings.model, config, settings.layout, settings.quant)


def check_shape(settings: EngineSettings, config: ModelConfig) -> None:
    """The same as far as its shape tells."""
    for problem in settings.layout.problems(config):
        raise ValueError(f"layout {settings.layout}: {problem}")
    if settings.max_len is not None and settings.max_len > config.max_positions:
        raise ValueError(
            f"max_len {settings.max_len} is more than the model's {config.max_positions} positions"
        )
