"""Settings of the engine and of the HTTP server. Imports no torch.

The flags of `shardwise serve`, `bench serve`, `generate` and `eval` are generated from the fields.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardwise.config import ModelConfig
from shardwise.kernels.page_table import BLOCK_TOKENS
from shardwise.kv_pages import PAGE_TOKENS
from shardwise.layout import Layout
from shardwise.precision import PRECISIONS, Precision
from shardwise.quant.kv_dtype import KvDtype, check_kv_dtype
from shardwise.quant.scheme import AUTO, parse_quant
from shardwise.serve.engine.scheduler import Limits
from shardwise.serve.request import SamplingParams
from shardwise.setting import REQUIRED, setting

if TYPE_CHECKING:
    from shardwise.formats.model_source import ModelSource

LEAST_BODY_BYTES = 1 << 20


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine: the model, its precision, and the limits of its batches.

    Raises ValueError for values that cannot be served.
    """

    model: Path
    layout: Layout = setting(
        Layout(), "how the model is sharded over devices, for example tp2", metavar="L"
    )
    dtype: Precision = setting("bf16", "dtype of weights, activations and KV cache")
    quant: str = setting(
        AUTO,
        "quantize the weights of the blocks while loading: int8, int4-g64 (groups of 64), "
        "int4z-g64 (with zero points), int3-g32, fp8, ...; auto keeps the codes of a quantized "
        "model where the device has kernels for them, as-stored keeps all, none dequantizes",
        metavar="Q",
    )
    kv_dtype: KvDtype = setting(
        "auto",
        "dtype of the KV cache: auto is --dtype; int8 and fp8 have one scale per token and head",
    )
    kv_bytes: int | None = setting(
        None, "size of the KV cache on each rank, in bytes", default_help="all memory left over"
    )
    memory_share: float | None = setting(
        None,
        "share of the free memory that the KV cache may take, as vLLM's gpu_memory_utilization",
        default_help="0.92 of a GPU, 0.5 of a machine",
    )
    max_len: int | None = setting(
        None,
        "maximum context length of a request, prompt plus output, in tokens",
        default_help="the model's",
    )
    page_tokens: int = PAGE_TOKENS
    max_batch_tokens: int = setting(512, "maximum tokens per engine step")
    max_running: int = setting(64, "maximum sequences in the batch")
    generation_config: Literal["auto", "none"] = setting(
        "auto",
        "sampling parameters of requests that leave them out: auto takes temperature, top_k, "
        "top_p, min_p and repetition_penalty from the model's generation_config.json, none does "
        "not",
    )
    max_queued: int = setting(
        1024, "length of the queue; further requests get status 429 with Retry-After"
    )

    def __post_init__(self) -> None:
        layout = self.layout
        if layout != Layout(tp=layout.tp):
            raise ValueError(
                f"serving shards a model by tensor parallelism only, not by {layout}; "
                f"tp{layout.tp} works"
            )
        if self.dtype not in PRECISIONS:
            raise ValueError(f"dtype is {self.dtype}, but must be {' or '.join(PRECISIONS)}")
        parse_quant(self.quant)
        check_kv_dtype(self.kv_dtype)
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise ValueError(
                f"memory_share is {self.memory_share:g}, but must be above 0 and at most 1"
            )
        if self.page_tokens < 1 or BLOCK_TOKENS % self.page_tokens:
            raise ValueError(
                f"page_tokens is {self.page_tokens}, but must divide {BLOCK_TOKENS}; 16 works"
            )
        _ = self.limits
        for name, least in (("max_len", 2), ("kv_bytes", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")

    @property
    def limits(self) -> Limits:
        """The limits of a batch and of the queue. Raises ValueError for those that conflict."""
        return Limits(self.max_batch_tokens, self.max_running, self.max_queued)


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP server: the names of its model, API keys, and limits of requests.

    `default_params` are the sampling parameters of requests that leave them out.

    Raises ValueError for names, keys or limits that cannot work.
    """

    model_names: tuple[str, ...] = setting(
        REQUIRED,
        "model name in the API; repeatable",
        flag="served-model-name",
        metavar="NAME",
        default_help="the last part of MODEL",
    )
    api_keys: tuple[str, ...] = setting(
        (),
        "require this API key, as one in --api-key-file or SHARDWISE_API_KEY does; repeatable",
        flag="api-key",
        metavar="KEY",
        default_help="no authentication",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "allow browser requests from this origin, or * for any; repeatable",
        flag="cors-origin",
        metavar="URL",
        default_help="none",
    )
    max_body_bytes: int = setting(
        4 << 20, "maximum size of a request body, at least 1 MiB", default_help="4 MiB"
    )
    max_connections: int = setting(
        1024, "connections at once; one more takes the place of the one that has idled longest"
    )
    header_timeout_s: float = setting(
        10.0, "seconds for the head of a request to arrive", flag="header-timeout", metavar="S"
    )
    body_timeout_s: float = setting(
        60.0, "seconds for the body of a request to arrive", flag="body-timeout", metavar="S"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "least severity that is logged; info logs requests and, every 10 s, tokens/s"
    )
    no_access_log: bool = setting(False, "log no line per request", default_help="a line each")
    no_docs: bool = setting(False, "serve no pages at /docs", default_help="Swagger UI at /docs")
    default_params: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ValueError("the name of the served model must not be empty")
        if not all(key.isascii() and key.strip() == key and key for key in self.api_keys):
            raise ValueError("an API key must be ASCII characters, without spaces around them")
        if self.max_body_bytes < LEAST_BODY_BYTES:
            raise ValueError(
                f"max_body_bytes is {self.max_body_bytes}, but must be at least "
                f"{LEAST_BODY_BYTES} (1 MiB)"
            )
        if self.max_connections < 1:
            raise ValueError(f"max_connections is {self.max_connections}, but must be at least 1")
        for name in ("header_timeout", "body_timeout"):
            seconds = getattr(self, f"{name}_s")
            if not 0 < seconds < math.inf:
                raise ValueError(f"{name} is {seconds:g}, but must be a number of seconds above 0")


def check_model(
    settings: EngineSettings, config: ModelConfig, source: "ModelSource | None" = None
) -> None:
    """Raise ValueError, before any process is started, if this model cannot be served so.

    `source` is the model of the settings, if it is already open.
    """
    from shardwise.formats.storage_formats import (
        quantized_formats,  # numpy, which --help does without
    )

    check_shape(settings, config)
    quantized_formats(source or settings.model, config, settings.layout, settings.quant)


def check_shape(settings: EngineSettings, config: ModelConfig) -> None:
    """Raise ValueError if the model's shape does not go with the settings."""
    for problem in settings.layout.problems(config):
        raise ValueError(f"layout {settings.layout}: {problem}")
    if settings.max_len is not None and settings.max_len > config.max_positions:
        raise ValueError(
            f"max_len is {settings.max_len}, but the model's context length is "
            f"{config.max_positions}"
        )
