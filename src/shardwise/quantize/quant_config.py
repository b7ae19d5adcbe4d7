"""What a user asks for when a model is written quantized: a scheme, the files, and the method.
Imports no torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.quant.scheme import GGUF_SCHEMES, Scheme

Method = Literal["rtn", "gptq", "awq"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True)
class QuantConfig:
    """`gguf` is the kind of blocks, Q8_0, Q4_0 or Q4_1, of a GGUF file; None: a folder as
    compressed-tensors has it."""

    scheme: Scheme
    method: Method = "rtn"
    gguf: str | None = None

    @classmethod
    def parse(cls, name: str, method: str = "rtn") -> "QuantConfig":
        """From what `--quant` and `--method` say. Raises ValueError for what is not known or does
        not go together."""
        if method not in METHODS:
            raise ValueError(f"{method!r} is no method to quantize; known are {', '.join(METHODS)}")
        form, colon, kind = name.partition(":")
        if not colon:
            quant_config = cls(Scheme.parse(name), method)
        elif form == "gguf" and kind.upper() in GGUF_SCHEMES:
            quant_config = cls(Scheme.parse(GGUF_SCHEMES[kind.upper()]), method, kind.upper())
        else:
            known = ", ".join(f"gguf:{each.lower()}" for each in GGUF_SCHEMES)
            raise ValueError(
                f"{name!r} is no way to quantize a file; {known} are, or for a folder int8, int4-g64 or fp8"
            )
        if quant_config.scheme.kind == "fp8" and quant_config.calibrated:
            raise ValueError(f"{method} chooses integers; fp8 is rounded to nearest: --method rtn")
        return quant_config

    @property
    def calibrated(self) -> bool:
        """Whether the method looks at a text."""
        return self.method != "rtn"
