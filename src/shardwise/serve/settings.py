"""How a model is served: what an engine is started with. Imports no torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardwise.layout import Layout

Dtype = Literal["bf16", "fp32"]


@dataclass(frozen=True)
class EngineSettings:
    """kv_bytes: of keys and values on each rank; None: what memory leaves. max_len: tokens of a prompt and its answer;
    None: the model's positions. The rest are the limits of a step and of the queue."""

    model: Path
    layout: Layout = field(default_factory=Layout)
    dtype: Dtype = "bf16"
    kv_bytes: int | None = None
    max_len: int | None = None
    page_tokens: int = 16
    max_batch_tokens: int = 512
    max_running: int = 64
    max_queued: int = 1024

    def __post_init__(self) -> None:
        layout = self.layout
        if layout != Layout(tp=layout.tp):
            raise ValueError(f"serving cuts a model over tensor ranks alone, not as {layout}; tp{layout.tp} works")
        for name, least in (("max_len", 2), ("kv_bytes", 1), ("max_running", 1), ("max_queued", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
