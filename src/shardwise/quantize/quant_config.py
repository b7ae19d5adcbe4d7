"""The settings of writing a quantized model: the scheme, the method and the file format. Imports no
torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.quant.scheme import GGUF_SCHEMES, Scheme

Method = Literal["rtn", "gptq", "awq"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True)
class QuantConfig:
    """A way to quantize a model.

    Attributes:
        scheme: the scheme of every matrix.
        method: round-to-nearest, GPTQ or AWQ.
        gguf: the type of the blocks of a GGUF file: Q8_0, Q4_0 or Q4_1. None: a folder in the
            compressed-tensors format.
    """

    scheme: Scheme
    method: Method = "rtn"
    gguf: str | None = None

    @classmethod
    def parse(cls, name: str, method: str = "rtn") -> "QuantConfig":
        """Parse the values of `--quant` and `--method`. Raises ValueError for unknown ones and for
        a combination that is not supported."""
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}; known are {', '.join(METHODS)}")
        container, colon, kind = name.partition(":")
        if not colon:
            config = cls(Scheme.parse(name), method)
        elif container == "gguf" and kind.upper() in GGUF_SCHEMES:
            config = cls(Scheme.parse(GGUF_SCHEMES[kind.upper()]), method, kind.upper())
        else:
            gguf = ", ".join(f"gguf:{each.lower()}" for each in GGUF_SCHEMES)
            raise ValueError(
                f"unknown quantization {name!r}; known are {gguf} for GGUF files, and int8, "
                "int4-g64, fp8 and others for folders"
            )
        if config.scheme.kind == "fp8" and config.calibrated:
            raise ValueError(f"{method} supports integers only; fp8 needs --method rtn")
        return config

    @property
    def calibrated(self) -> bool:
        """True if the method needs a calibration text."""
        return self.method != "rtn"
