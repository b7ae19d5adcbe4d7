"""GPTQ and AWQ against their definitions worked out the long way; scales taken in without changing
a block; and a model quantized block by block, each seeing the errors of those before it, with one
of them in memory."""

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from shardwise.block import MATRICES
from shardwise.config import ModelConfig
from shardwise.formats.huggingface.hf_config import from_hugging_face
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.model.layers import Causal, RecomputedInput, linear
from shardwise.model.transformer import BlockWeights, Transformer
from shardwise.params import model_specs
from shardwise.quant.format import (
    QuantizedMatrix,
    choose_scales,
    codes_of,
    dequantize,
    encode,
    quantize,
)
from shardwise.quant.scheme import Scheme
from shardwise.quantize.awq import CLIP_RATIOS, clipped, input_scales, within_groups
from shardwise.quantize.fold import folds
from shardwise.quantize.gptq import DAMPING, gptq
from shardwise.quantize.quant_config import QuantConfig
from shardwise.quantize.quantizer import Quantizer
from shardwise.quantize.statistics import InputStatistics, ObservedWeight
from tiny_models import MODELS, our_weights, tiny_model

SCHEMES = (
    "int4-g32",
    "int4z-g32",
    "int3-g32",
    "int8",
    "int4",
    "int3z-g64",
    "int8z-g16",
    "int4-g256",
)


def drawn(num_rows: int, num_columns: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))


def inputs(num_columns: int, seed: int = 1, num_rows: int = 600) -> Tensor:
    """Correlated columns of very different sizes, like activations."""
    mixed = drawn(num_rows, num_columns // 2, seed) @ drawn(num_columns // 2, num_columns, seed + 1)
    return (mixed + drawn(num_rows, num_columns, seed + 2)) * drawn(1, num_columns, seed + 3).exp()


def statistics_of(x: Tensor) -> InputStatistics:
    return InputStatistics(x.t() @ x / len(x), x.abs().mean(0))


# -- what is known of the inputs


def test_statistics_are_means_over_all_inputs() -> None:
    weight = drawn(6, 16)
    x = inputs(16)
    watched = ObservedWeight(weight)
    for piece in x.view(2, 50, 6, 16):
        assert torch.equal(linear(piece, watched), F.linear(piece, weight))
    light = RecomputedInput(lambda a: 2 * a, (x,))
    assert torch.equal(linear(light, watched), F.linear(2 * x, weight))
    found = watched.statistics()
    whole = torch.cat([x, 2 * x]).double()
    torch.testing.assert_close(
        found.second_moment.double(), whole.t() @ whole / 1200, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(found.magnitude.double(), whole.abs().mean(0), rtol=1e-5, atol=1e-5)
    change = drawn(6, 16, 9)
    wanted = (whole @ change.double().t()).pow(2).sum(-1).mean()
    assert found.output_error(change) == pytest.approx(float(wanted), rel=1e-4)
    halved = found.divided(torch.full((16,), 2.0))
    assert halved.output_error(2 * change) == pytest.approx(found.output_error(change), rel=1e-5)


def test_activations_that_are_not_finite_are_an_error() -> None:
    watched = ObservedWeight(torch.ones(2, 4))
    linear(torch.full((3, 4), torch.inf), watched)
    with pytest.raises(ValueError, match="activations are infinite or NaN"):
        watched.statistics()


# -- GPTQ


def surgeon(weight: Tensor, scheme: Scheme, second_moment: Tensor) -> tuple[Tensor, Tensor]:
    """The optimal brain surgeon, column by column in doubles: after each, the rest of the inverse
    is what it would be without that column. GPTQ has the same from one Cholesky factor. Codes and
    scales."""
    weight = weight.double().clone()
    hessian = second_moment.double().clone()
    hessian += DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian))
    inverse = torch.linalg.inv(hessian)
    group = scheme.group or weight.shape[1]
    codes = []
    scales = []
    one = replace(scheme, group=None)
    for column in range(weight.shape[1]):
        if column % group == 0:
            chosen = choose_scales(weight[:, column : column + group].float(), one)
            scales.append(chosen[0])
        rounded = encode(weight[:, column : column + 1].float(), one, *chosen)
        codes.append(codes_of(rounded)[:, 0])
        error = (weight[:, column] - dequantize(rounded, torch.float64)[:, 0]) / inverse[
            column, column
        ]
        weight -= error[:, None] * inverse[column]
        inverse = (
            inverse - inverse[:, column : column + 1] * inverse[column] / inverse[column, column]
        )
    return torch.stack(codes, 1), torch.cat(scales, 1)


@pytest.mark.parametrize("name", SCHEMES)
def test_gptq_is_the_optimal_brain_surgeon(name: str) -> None:
    """In fp32, so a weight right between two codes may fall to the other side, and then a few after
    it: 0.5 %."""
    scheme = Scheme.parse(name)
    weight = drawn(12, 256)
    second = statistics_of(inputs(256)).second_moment
    found = gptq(weight, scheme, second)
    codes, scales = surgeon(weight, scheme, second)
    assert (codes_of(found) != codes).float().mean() <= 0.005
    torch.testing.assert_close(found.scales.float(), scales.float(), rtol=2**-7, atol=0)


@settings(max_examples=examples(30))
@given(name=st.sampled_from(SCHEMES), seed=st.integers(0, 10**6))
def test_gptq_changes_outputs_less_than_rounding(name: str, seed: int) -> None:
    """The mean over many rows: a single row may become worse."""
    scheme = Scheme.parse(name)
    weight = drawn(64, 256, seed)
    known = statistics_of(inputs(256, seed + 1))
    kept = weight.clone()
    error = known.output_error(
        dequantize(gptq(weight, scheme, known.second_moment), torch.float32) - weight
    )
    assert error < known.output_error(dequantize(quantize(weight, scheme), torch.float32) - weight)
    assert torch.equal(weight, kept)


@pytest.mark.parametrize("name", SCHEMES)
def test_gptq_of_uncorrelated_inputs_is_round_to_nearest(name: str) -> None:
    scheme = Scheme.parse(name)
    weight = drawn(5, 256)
    found = gptq(weight, scheme, torch.eye(256))
    rounded = quantize(weight, scheme)
    assert torch.equal(found.codes, rounded.codes) and torch.equal(found.scales, rounded.scales)


def test_gptq_of_a_column_whose_input_is_zero() -> None:
    """The weights of an input that is always zero become 0; the others are as without it."""
    x = inputs(64)
    x[:, 40] = 0
    weight = drawn(5, 64)
    scheme = Scheme.parse("int4-g32")
    found = gptq(weight, scheme, statistics_of(x).second_moment)
    assert (codes_of(found)[:, 40] == 0).all()
    nothing = gptq(weight, scheme, torch.zeros(64, 64))
    assert (codes_of(nothing) == 0).all()


def test_gptq_of_fewer_rows_than_columns() -> None:
    scheme = Scheme.parse("int4-g32")
    weight = drawn(8, 128)
    known = statistics_of(inputs(128, num_rows=20))
    error = known.output_error(
        dequantize(gptq(weight, scheme, known.second_moment), torch.float32) - weight
    )
    assert error < 0.5 * known.output_error(
        dequantize(quantize(weight, scheme), torch.float32) - weight
    )


# -- AWQ


@given(name=st.sampled_from(SCHEMES), seed=st.integers(0, 10**6))
def test_awq_scales_never_increase_the_error_on_their_text(name: str, seed: int) -> None:
    scheme = Scheme.parse(name)
    weight = drawn(6, 256, seed)
    known = statistics_of(inputs(256, seed + 1))
    scales = input_scales(weight, scheme, known, lambda s: s)
    assert (scales > 0).all()
    scaled = dequantize(quantize(weight * scales, scheme), torch.float32) / scales
    rounded = dequantize(quantize(weight, scheme), torch.float32)
    assert known.output_error(scaled - weight) <= known.output_error(rounded - weight) * 1.0001


def test_scales_grow_with_the_inputs() -> None:
    """An input that is a thousand times as large as the others gets finer steps."""
    x = drawn(500, 64)
    x[:, 7] *= 1000
    scales = input_scales(drawn(16, 64), Scheme.parse("int3-g64"), statistics_of(x), lambda s: s)
    others = torch.cat([scales[:7], scales[8:]])
    assert scales[7] > 1.3 * others.max()


@given(name=st.sampled_from(SCHEMES), seed=st.integers(0, 10**6))
def test_clipping_finds_the_best_range_of_each_group(name: str, seed: int) -> None:
    scheme = Scheme.parse(name)
    weight = drawn(4, 256, seed)
    second = statistics_of(inputs(256, seed + 1)).second_moment
    found = clipped(weight, scheme, second)
    size = scheme.group or 256

    def errors(quantized: QuantizedMatrix) -> Tensor:
        """The error [N, G] of each group."""
        change = (dequantize(quantized, torch.float32) - weight).double().split(size, 1)
        blocks = [second.double()[at : at + size, at : at + size] for at in range(0, 256, size)]
        return torch.stack([((e @ c) * e).sum(1) for e, c in zip(change, blocks, strict=True)], 1)

    tried = [
        errors(encode(weight, scheme, *choose_scales(weight * share, scheme)))
        for share in CLIP_RATIOS
    ]
    torch.testing.assert_close(errors(found), torch.stack(tried).amin(0), rtol=1e-3, atol=1e-6)
    assert torch.equal(within_groups(second, scheme)[-1], second[-size:, -size:])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_block_computes_the_same_with_folded_scales(name: str, dtype: torch.dtype) -> None:
    """The tolerance is rounding in fp32, 1e-5 of the largest, although norms are stored in bf16;
    biases, which are not exact in bf16, are stored in fp32 here."""
    model = tiny_model(name, dtype)
    config = from_hugging_face(model.config.to_dict())
    weights = our_weights(model)
    block = {
        key.removeprefix("blocks.0."): each.float()
        for key, each in weights.items()
        if key.startswith("blocks.0.")
    }
    scaled = dict(block)
    random = torch.Generator().manual_seed(0)
    plain_bias = dtype == torch.float32 or not any(
        key.startswith("norm") and "bias" in key for key in block
    )
    for fold in folds(config, dtype):
        asked = torch.rand(block[fold.matrix].shape[1], generator=random) * 4 + 0.1
        scales = fold.foldable(scaled, asked)
        assert (scales > 0).all() and scales.std() > 0.1
        scaled = fold.apply(scaled, scales)
        assert all(
            torch.equal(scaled[norm], scaled[norm].to(dtype).float()) for norm in ("norm1", "norm2")
        )
    assert len(folds(config, dtype)) == (4 if config.gated else 3)
    wanted, again = (run_block(config, each) for each in (block, scaled))
    assert (wanted - again).abs().max() <= (1e-5 if plain_bias else 1e-2) * wanted.abs().max()


def run_block(config: ModelConfig, block: Mapping[str, Tensor]) -> Tensor:
    decoder = Transformer(config, REFERENCE)
    rope = decoder.rope_tables(torch.arange(20)[None], torch.float32)
    x = drawn(20, config.hidden_size)[None]
    return decoder.block(x, 0, BlockWeights(**block), rope, Causal(config, causal_attention))


# -- a whole model


class LazyWeights(Mapping[str, Tensor]):
    """Weights that are created when they are read, and the names of those still in memory."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self.lent: dict[str, weakref.ref[Tensor]] = {}

    def __getitem__(self, name: str) -> Tensor:
        copy = self.weights[name].float().clone()
        self.lent[name] = weakref.ref(copy)
        return copy

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def held(self) -> set[str]:
        return {name for name, each in self.lent.items() if each() is not None}


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
@pytest.mark.parametrize("name", ["llama-biases", "gpt2"])
def test_only_one_block_is_in_float_at_a_time(name: str, method: str) -> None:
    model = tiny_model(name)
    config = from_hugging_face(model.config.to_dict())
    weights = LazyWeights(our_weights(model))
    quant_config = QuantConfig.parse("int4-g32", method)
    seen = []
    progress = []
    text = (
        torch.randint(101, (9, 64), generator=torch.Generator().manual_seed(0))
        if quant_config.calibrated
        else None
    )
    parameters = Quantizer(config, quant_config, torch.float32).parameters(
        weights, text, lambda *each: progress.append(each)
    )
    for key, value in parameters:
        assert isinstance(value, QuantizedMatrix) == (key.split(".")[-1] in MATRICES)
        seen.append(key)
        del value
        blocks = {each.split(".")[1] for each in weights.held if each.startswith("blocks.")}
        assert len(blocks) <= 1
    assert seen == [spec.name for spec in model_specs(config) if spec.tied_to is None]
    assert progress == [("quantizing", 0.5), ("quantizing", 1.0)]


def test_a_block_sees_the_errors_of_those_before_it() -> None:
    """GPTQ of the second block by hand, with the outputs of the quantized first block as inputs."""
    model = tiny_model("qwen2")
    config = from_hugging_face(model.config.to_dict())
    weights = our_weights(model)
    quant_config = QuantConfig.parse("int3-g32", "gptq")
    text = torch.randint(101, (6, 50), generator=torch.Generator().manual_seed(0))
    made = dict(
        Quantizer(config, quant_config, torch.float32).parameters(weights, text, lambda *_: None)
    )
    first = {
        key: dequantize(value, torch.float32) if isinstance(value, QuantizedMatrix) else value
        for key, value in made.items()
        if not key.startswith("blocks.1.")
    }
    decoder = Transformer(config, REFERENCE)
    positions = torch.arange(50)[None]
    x = decoder.embed(first, text, positions)
    rope = decoder.rope_tables(positions, torch.float32)
    x = decoder.block(x, 0, BlockWeights.of(first, 0), rope, Causal(config, causal_attention))
    into = decoder.norm(x, weights["blocks.1.norm1"]).flatten(0, 1)
    wanted = gptq(weights["blocks.1.qkv"], quant_config.scheme, into.t() @ into / len(into))
    found = made["blocks.1.qkv"]
    assert isinstance(found, QuantizedMatrix)
    assert (codes_of(found) != codes_of(wanted)).float().mean() <= 0.005  # sums in another order
    rounded = quantize(weights["blocks.1.qkv"], quant_config.scheme)
    assert (codes_of(found) != codes_of(rounded)).float().mean() > 0.05


def test_rounding_a_model_is_rounding_its_matrices() -> None:
    model = tiny_model("llama-tied")
    config = from_hugging_face(model.config.to_dict())
    weights = our_weights(model)
    for name in ("int8", "int4z-g32", "fp8"):
        made = dict(
            Quantizer(config, QuantConfig.parse(name), torch.float32).parameters(
                weights, None, lambda *_: None
            )
        )
        for key, value in made.items():
            if isinstance(value, QuantizedMatrix):
                wanted = quantize(weights[key], Scheme.parse(name))
                assert torch.equal(value.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
            else:
                assert torch.equal(value, weights[key])


def test_weights_that_are_not_finite_are_an_error() -> None:
    model = tiny_model("llama")
    config = from_hugging_face(model.config.to_dict())
    weights = our_weights(model)
    weights["blocks.1.down"][3, 3] = torch.nan
    parameters = Quantizer(config, QuantConfig.parse("int8"), torch.float32).parameters(
        weights, None, lambda *_: None
    )
    with pytest.raises(ValueError, match=r"blocks\.1\.down has infinities or NaNs"):
        list(parameters)


@pytest.mark.parametrize(
    ("name", "method", "sentence"),
    [
        ("int5", "rtn", "unknown quantization scheme 'int5'; did you mean int"),
        (
            "gguf:q5_0",
            "rtn",
            "unknown quantization 'gguf:q5_0'; known are gguf:q8_0, gguf:q4_0, gguf:q4_1",
        ),
        ("awq", "rtn", "unknown quantization scheme 'awq'; awq is a method of `convert`"),
        ("awq:int4", "rtn", "unknown quantization 'awq:int4'"),
        ("int4-g32", "gtpq", "unknown method 'gtpq'; known are rtn, gptq, awq"),
        ("fp8", "gptq", "gptq supports integers only; fp8 needs --method rtn"),
    ],
)
def test_unknown_quantization_settings(name: str, method: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        QuantConfig.parse(name, method)
    assert sentence in str(caught.value)
