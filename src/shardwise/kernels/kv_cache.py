"""Pages of the KV cache of one layer, in the model's dtype or in 8 bits.

The key, or the value, of one token and head is a vector of C numbers. In 8 bits it is C codes and
one fp32 scale: x = scale * code, where codes are integers from -127 to 127 (int8) or floats up to
448 (fp8 e4m3, Micikevicius et al., arXiv 2209.05433). The scale maps the largest number of the
vector to the largest code. So what a token writes depends on that token alone, and pages can be
shared, copied and written in any order.

Products use the codes, which bf16 represents exactly. Scores are multiplied by the scale of the
key, and probabilities by the scale of the value.

Shapes: N tokens of a step, K kv heads, C head dim, P tokens of a page.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.quant.kv_dtype import KvDtype

CODES: dict[KvDtype, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
FP8_NORMAL = 2.0**-6
"""The smallest normal e4m3 number. Smaller codes become 0, at most 1 / 28,672 of the largest
number: products of bf16 may flush them to zero where they are shifted into bf16
(`csrc/attention.h`)."""


@dataclass(frozen=True)
class Vectors:
    """Keys, or values, of one layer.

    Attributes:
        numbers: Numbers or codes [K, pages, P, C].
        scales: [K, pages, P] in fp32, of codes only.
    """

    numbers: Tensor
    scales: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.numbers,) if self.scales is None else (self.numbers, self.scales)

    def write(self, slots: Tensor, new: Tensor) -> None:
        """Write the vectors [N, K, C] into `slots` [N] (page * P + offset)."""
        if self.scales is None:
            write_pages(self.numbers, slots, new)
            return
        codes, scales = quantize_vectors(new, self.numbers.dtype)
        write_pages(as_bytes(self.numbers), slots, as_bytes(codes))
        self.scales.view(len(self.scales), -1).index_copy_(1, slots, scales.t())

    def gather(self, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return numbers, or codes as numbers, [K, pages * P, C], and scales [K, pages * P] of some
        pages."""
        numbers = self.numbers.index_select(1, pages).flatten(1, 2).to(dtype)
        if self.scales is None:
            return numbers, None
        return numbers, self.scales.index_select(1, pages).flatten(1)


@dataclass(frozen=True)
class KVPages:
    """Keys and values of one layer."""

    keys: Vectors
    values: Vectors

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int, int, int],
        kv_dtype: KvDtype,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> "KVPages":
        """Allocate uninitialized pages [K, pages, P, C] for a model that computes in `dtype`."""

        def vectors() -> Vectors:
            numbers = torch.empty(shape, dtype=CODES.get(kv_dtype, dtype), device=device)
            scales = None if kv_dtype == "auto" else torch.empty(shape[:3], device=device)
            return Vectors(numbers, scales)

        return cls(vectors(), vectors())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.keys.tensors, *self.values.tensors)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy whole pages, by their indices."""
        for pages in self.tensors:
            pages[:, target] = pages[:, source]


def write_pages(pages: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write keys or values [N, K, C] into the `slots` [N] of pages [K, pages, P, C]."""
    pages.view(pages.shape[0], -1, pages.shape[-1]).index_copy_(1, slots, new.transpose(0, 1))


def quantize_vectors(x: Tensor, codes: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize x [..., C] to codes [..., C] and scales [...] in fp32.

    A vector of zeros has scale 0. A vector with a number that is not finite has a scale that is not
    finite.
    """
    x = x.float()
    scales = x.abs().amax(-1) / LARGEST[codes]
    in_steps = (x / scales[..., None]).clamp_(-LARGEST[codes], LARGEST[codes]).nan_to_num_(0.0)
    if codes == torch.int8:
        return in_steps.round_().to(codes), scales
    return in_steps.masked_fill_(in_steps.abs() < FP8_NORMAL, 0.0).to(codes), scales


def as_bytes(codes: Tensor) -> Tensor:
    """View codes as uint8, for operations that torch does not have for fp8."""
    return codes.view(torch.uint8)
