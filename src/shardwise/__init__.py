"""Plan, train and serve language models sharded over many devices, from one description of the
sharding."""

from typing import Any

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import LLM and SamplingParams, and look the version up, on first use: LLM needs torch, which
    the planner does not."""
    if name == "LLM":
        from shardwise.serve.llm import LLM

        return LLM
    if name == "SamplingParams":
        from shardwise.serve.request import SamplingParams

        return SamplingParams
    if name == "__version__":
        from importlib.metadata import version

        return version("shardwise")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
