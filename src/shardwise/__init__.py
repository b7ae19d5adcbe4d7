"""Plans, trains and serves language models that are cut over many devices, from one description of
the cut."""

from typing import Any

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """`from shardwise import LLM, SamplingParams`, which alone needs torch: the planner does
    not."""
    if name == "LLM":
        from shardwise.serve.llm import LLM

        return LLM
    if name == "SamplingParams":
        from shardwise.serve.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
