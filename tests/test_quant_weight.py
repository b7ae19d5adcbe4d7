"""Quantized weights in place of floating-point ones: matmuls, gradients, batch-invariant rows, the
blocks of GGUF files."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples import examples
from quantized_files import drawn_blocks
from shardwise.config import ModelConfig
from shardwise.formats.huggingface.hf_config import from_hugging_face
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.batch_invariant import RowWeight, row_weights
from shardwise.kernels.reference.norm import rms_norm
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.model.layers import Causal, RecomputedInput, linear
from shardwise.model.transformer import Transformer
from shardwise.parallel.pipeline.deferred import Deferred, DeferredGradient
from shardwise.quant.format import QuantizedMatrix, dequantize, quantize
from shardwise.quant.ggml import BLOCKS
from shardwise.quant.ggml_blocks import GgmlMatrix, from_ggml_blocks, stack_ggml
from shardwise.quant.ggml_decode import decode_blocks
from shardwise.quant.scheme import Scheme, ggml_format
from shardwise.quant.weight import FloatMatrix, MatrixPart, QuantizedWeight
from tiny_models import our_weights, tiny_model

KINDS = [kind for kind, block in BLOCKS.items() if block.num_elements > 1]


def random_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn_weight(num_columns: int = 256) -> QuantizedWeight:
    """A weight whose rows are in five formats."""
    weight = torch.randn(24, num_columns, generator=random_of(1))
    pieces: list[MatrixPart] = [
        quantize(weight, Scheme.parse(name)) for name in ("int4-g32", "int3z-g64", "fp8")
    ]
    pieces += [
        GgmlMatrix("Q6_K", (7, num_columns), drawn_blocks("Q6_K", 7, num_columns)),
        FloatMatrix(weight[:5]),
    ]
    return QuantizedWeight(tuple(pieces))


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_blocks_convert_without_loss(kind: str) -> None:
    """Conversion preserves every weight and the number of bytes, also of rows and columns."""
    raw = drawn_blocks(kind, 9, 512)
    shape = (9, 512)
    wanted = decode_blocks(raw, kind, shape)
    piece = from_ggml_blocks(raw, kind, shape)
    assert isinstance(piece, QuantizedMatrix) == (kind in ("Q8_0", "Q4_0", "Q4_1"))

    def plain(held: QuantizedMatrix | GgmlMatrix) -> Tensor:
        return QuantizedWeight((held,)).dequantized(torch.float32)

    assert torch.equal(plain(piece), wanted)
    storage = ggml_format(kind)
    assert storage is not None and storage.num_bytes(shape) == piece.num_bytes == raw.nbytes
    assert torch.equal(plain(piece.rows(2, 7).columns(256, 512)), wanted[2:7, 256:])
    assert torch.equal(
        plain(stack_ggml([piece, piece])) if isinstance(piece, GgmlMatrix) else wanted.repeat(2, 1),
        wanted.repeat(2, 1),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmul_and_gradient_equal_those_of_the_dequantized_matrix(dtype: torch.dtype) -> None:
    """The tolerance is 1e-5 of the largest in fp32, 1e-2 in bf16. The weight itself has no
    gradient."""
    weight = drawn_weight()
    plain = weight.dequantized(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    x = torch.randn(2, 3, 256, generator=random_of(2)).to(dtype).requires_grad_()
    y = linear(x, weight)
    dy = torch.randn(y.shape, generator=random_of(3)).to(dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    wanted = x.detach().double() @ plain.double().t()
    wanted_dx = dy.double() @ plain.double()
    assert y.dtype == dx.dtype == dtype and y.shape == (2, 3, 24 * 3 + 12)
    assert (y - wanted).abs().max() <= tolerance * wanted.abs().max()
    assert (dx - wanted_dx).abs().max() <= tolerance * wanted_dx.abs().max()


def test_gradcheck() -> None:
    weight = QuantizedWeight(
        (quantize(torch.randn(5, 16, generator=random_of(1)), Scheme.parse("int4-g8")),)
    )
    x = torch.randn(3, 16, dtype=torch.float64, generator=random_of(2), requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: weight.apply(x.float()).double(), x, eps=1e-2, atol=1e-3
    )


def test_recomputed_inputs_are_recomputed() -> None:
    """Gradients are the same as without selective recompute; x is computed twice instead of being
    saved."""
    weight = drawn_weight()
    scale = torch.rand(256).requires_grad_()
    x = torch.randn(4, 256, generator=random_of(2), requires_grad=True)
    times: list[int] = []

    def make(x: Tensor, scale: Tensor) -> Tensor:
        times.append(1)
        return rms_norm(x, scale, 1e-5)

    light = torch.autograd.grad(
        linear(RecomputedInput(make, (x, scale)), weight).square().sum(), (x, scale)
    )
    assert len(times) == 2
    kept = torch.autograd.grad(linear(make(x, scale), weight).square().sum(), (x, scale))
    assert all(torch.equal(one, other) for one, other in zip(light, kept, strict=True))


@dataclass(frozen=True)
class LowRank:
    """LoRA (Hu et al. 2022): a frozen weight and a trained product of two thin matrices."""

    base: QuantizedWeight | Tensor
    down: Tensor | Deferred
    up: Tensor | Deferred

    def apply(self, x: Tensor | RecomputedInput) -> Tensor:
        made = x.make(*x.inputs) if isinstance(x, RecomputedInput) else x
        return linear(x, self.base) + linear(linear(made, self.down), self.up)


Weights = dict[str, Tensor | QuantizedWeight]


def frozen_model() -> tuple[ModelConfig, Weights]:
    """A model with the matrices of its blocks in int4."""
    theirs = tiny_model("qwen3")
    weights: Weights = dict(our_weights(theirs))
    for name, weight in weights.items():
        if name.startswith("blocks.") and isinstance(weight, Tensor) and weight.dim() == 2:
            weights[name] = QuantizedWeight((quantize(weight, Scheme.parse("int4-g32")),))
    return from_hugging_face(theirs.config.to_dict()), weights


def drawn_thin(weights: Weights, up: float) -> dict[str, tuple[Tensor, Tensor]]:
    """Random low-rank factors of rank 4 for each quantized weight; `up` scales the second
    factor."""
    random = random_of(5)
    return {
        name: (
            (0.2 * torch.randn(4, weight.shape[1], generator=random)).requires_grad_(),
            (up * torch.randn(weight.shape[0], 4, generator=random)).requires_grad_(),
        )
        for name, weight in weights.items()
        if isinstance(weight, QuantizedWeight)
    }


def logits_of(
    config: ModelConfig, weights: Weights, thin: dict[str, tuple[Tensor, Tensor]], selective: bool
) -> Tensor:
    ids = torch.randint(config.vocab_size, (2, 12), generator=random_of(4))
    positions = torch.arange(12).expand(2, 12)
    adapted = weights | {name: LowRank(weights[name], *each) for name, each in thin.items()}
    decoder = Transformer(config, REFERENCE, recompute_inputs=selective)
    return decoder.forward(adapted, ids, positions, Causal(config, causal_attention))  # type: ignore[arg-type]


@pytest.mark.parametrize("selective", [False, True])
def test_adapters_have_the_gradients_of_float_weights(selective: bool) -> None:
    """Gradients through a whole model equal those with the dequantized weights, to 1e-4."""
    config, weights = frozen_model()
    plain = {
        n: w.dequantized(torch.float32) if isinstance(w, QuantizedWeight) else w
        for n, w in weights.items()
    }
    thin = drawn_thin(weights, up=0.1)
    leaves = [leaf for pair in thin.values() for leaf in pair]
    found, wanted = (
        torch.autograd.grad(logits_of(config, held, thin, selective).square().mean(), leaves)
        for held in (weights, plain)
    )
    for mine, other in zip(found, wanted, strict=True):
        assert other.abs().max() > 0
        assert (mine - other).abs().max() <= 1e-4 * other.abs().max()


@pytest.mark.parametrize("selective", [False, True])
def test_adapters_learn_and_quantized_weights_do_not_change(selective: bool) -> None:
    """Adapters start at zero, as in LoRA, and twelve steps reduce the loss by a third."""
    config, weights = frozen_model()
    before = {
        n: w.dequantized(torch.float32)
        for n, w in weights.items()
        if isinstance(w, QuantizedWeight)
    }
    thin = drawn_thin(weights, up=0.0)
    optimizer = torch.optim.AdamW(
        [leaf for pair in thin.values() for leaf in pair], lr=0.02, weight_decay=0.0
    )
    targets = torch.randint(config.vocab_size, (2, 12), generator=random_of(9)).flatten()
    losses = []
    for _ in range(12):
        loss = cross_entropy(logits_of(config, weights, thin, selective).flatten(0, 1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert (
        losses[0]
        == cross_entropy(logits_of(config, weights, {}, selective).flatten(0, 1), targets).item()
    )
    assert losses[-1] < losses[0] * 2 / 3
    for name, weight in weights.items():
        if isinstance(weight, QuantizedWeight):
            assert torch.equal(weight.dequantized(torch.float32), before[name]), name
        else:
            assert weight.grad is None, name


def test_gradients_of_adapters_can_be_deferred() -> None:
    """As in a zero-bubble schedule, dx is computed at once and the gradients of the factors from
    the tape, also with a recomputed input; they equal those with the dequantized weight to 1e-4 of
    the largest. The quantized weight defers nothing."""
    weight = drawn_weight()
    scale = torch.rand(256, generator=random_of(1))
    x = torch.randn(3, 4, 256, generator=random_of(2), requires_grad=True)
    down = torch.randn(4, 256, generator=random_of(3)).requires_grad_()
    up = torch.randn(84, 4, generator=random_of(4)).requires_grad_()
    dy = torch.randn(3, 4, 84, generator=random_of(5))

    def light(x: Tensor) -> RecomputedInput:
        return RecomputedInput(partial(rms_norm, eps=1e-5), (x, scale))

    tape: list[DeferredGradient] = []
    waiting = LowRank(weight, Deferred("down", down, tape), Deferred("up", up, tape))
    (dx,) = torch.autograd.grad(linear(light(x), waiting), x, dy)
    found = {owed.name: owed.gradient() for owed in tape} | {"x": dx}
    plain = linear(light(x), LowRank(weight.dequantized(torch.float32), down, up))
    wanted = dict(
        zip(("x", "down", "up"), torch.autograd.grad(plain, (x, down, up), dy), strict=True)
    )
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_columns", [256, 1536])
def test_rows_are_batch_invariant(dtype: torch.dtype, num_columns: int) -> None:
    """Weights are in more than one strip: 1536 columns and 2,000 rows are three."""
    many = quantize(torch.randn(2000, num_columns, generator=random_of(7)), Scheme.parse("int8"))
    weight = QuantizedWeight((*drawn_weight(num_columns).parts, many))
    ready = row_weights({"norm": torch.ones(2, dtype=dtype), "blocks.0.out": weight})[
        "blocks.0.out"
    ]
    assert isinstance(ready, RowWeight)
    x = torch.randn(300, num_columns, generator=random_of(8)).to(dtype)
    wanted = ready.apply(x)
    assert (wanted - linear(x, weight)).abs().max() <= 2e-2 * wanted.abs().max()

    @given(st.integers(0, 299), st.integers(1, 70))
    @settings(deadline=None, max_examples=examples(30))
    def agrees(start: int, count: int) -> None:
        assert torch.equal(ready.apply(x[start : start + count]), wanted[start : start + count])

    agrees()


def test_num_bytes_is_the_sum_of_the_parts() -> None:
    weight = drawn_weight()
    assert weight.num_bytes == sum(piece.num_bytes for piece in weight.parts)
    assert weight.shape == (84, 256) and torch.equal(
        weight.to("cpu").dequantized(torch.float32), weight.dequantized(torch.float32)
    )
    (quantized, *_) = weight.parts
    assert isinstance(quantized, QuantizedMatrix)
    assert torch.equal(weight.dequantized(torch.float32)[:24], dequantize(quantized, torch.float32))
