"""Plan, train and serve language models sharded over many devices, from one description of the
sharding."""

from typing import Any

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import LLM and SamplingParams on first use: LLM needs torch, the planner does not."""
    if name == "LLM":
        from shardwise.serve.llm import LLM

        return LLM
    if name == "SamplingParams":
        from shardwise.serve.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
