"""All blocks of a decoder in one native call are bit-identical to the same blocks run one by
one."""

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engines import fill_with_anything, tiny
from examples import examples
from shardwise.config import ModelConfig
from shardwise.kernels.native.library import instruction_sets
from shardwise.kernels.native.serving import NativePagedAttention
from shardwise.kernels.registry import native_kernels
from shardwise.layout import Layout
from shardwise.parallel.mesh import make_mesh
from shardwise.params import model_specs
from shardwise.quant.format import quantize
from shardwise.quant.kv_dtype import KvDtype
from shardwise.quant.scheme import Scheme, quantizable
from shardwise.quant.weight import QuantizedWeight
from shardwise.quantize.load_quantized import Weights
from shardwise.serve.engine.runner import Runner
from shardwise.serve.engine.sequence import Batch, BatchEntry

pytestmark = pytest.mark.skipif(
    not instruction_sets(), reason="the native kernels are not built: no compiler"
)

CPU = torch.device("cpu")
BF16 = torch.bfloat16
WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


def runner(
    config: ModelConfig,
    plain: Mapping[str, Tensor],
    kv_dtype: KvDtype,
    quant: str | None,
    name: str,
) -> Runner:
    weights: Weights = dict(plain)
    scheme = Scheme.parse(quant) if quant else None
    for spec in model_specs(config):
        if scheme is not None and quantizable(spec):
            weights[spec.name] = QuantizedWeight((quantize(plain[spec.name].float(), scheme),))
    mesh = make_mesh(Layout(), 0, CPU, config.num_kv_heads)
    made = Runner(config, weights, mesh, BF16, 16, native_kernels(name), kv_dtype)
    made.make_pages(16)
    for pages in made.pages:
        fill_with_anything(pages)
    return made


def runner_of_family(
    family: str, kv_dtype: KvDtype, quant: str | None, name: str, **changes: object
) -> Runner:
    model = tiny(family, BF16, **WIDE | changes)
    return runner(model.config, model.weights, kv_dtype, quant, name)


def batches() -> list[Batch]:
    """A prompt; then another next to a token of the first; then a token of both."""
    first = tuple(range(40))
    second = tuple(range(7, 30))
    return [
        Batch((BatchEntry(0, first, 0, (3, 1, 2), 1, 0),), ()),
        Batch(
            (
                BatchEntry(0, (5,), 40, (3, 1, 2), 1, None),
                BatchEntry(1, second, 0, (0, 5), 1, None),
            ),
            (),
        ),
        Batch(
            (BatchEntry(0, (6,), 41, (3, 1, 2), 1, None), BatchEntry(1, (9,), 23, (0, 5), 1, None)),
            (),
        ),
    ]


def check_bits(together: Runner, apart: Runner) -> None:
    assert together.blocks is not None
    apart.blocks = None
    for batch in batches():
        found, found_logprobs = together.run(batch)
        expected, expected_logprobs = apart.run(batch)
        assert found_logprobs == expected_logprobs
        for id, logits in expected.items():
            assert torch.equal(found[id], logits)


@pytest.mark.parametrize("name", instruction_sets())
@pytest.mark.parametrize(
    ("family", "kv_dtype", "quant"),
    [
        ("llama", "auto", None),
        ("llama-tied", "int8", "int8"),
        ("llama-biases", "auto", "int8"),
        ("mistral", "auto", "int4z-g32"),
        ("llama", "fp8", "int4-g64"),
        ("qwen2", "auto", "int4-g32"),
        ("qwen3", "int8", None),
    ],
)
def test_decoder_is_bit_identical_to_blocks_one_by_one(
    family: str, kv_dtype: KvDtype, quant: str | None, name: str
) -> None:
    together, apart = (runner_of_family(family, kv_dtype, quant, name) for _ in range(2))
    check_bits(together, apart)


@st.composite
def decoders(draw: st.DrawFn, quant: str | None) -> ModelConfig:
    """Decoders with and without biases, norms of q and k, and a window, each separately."""
    num_kv_heads = draw(st.integers(1, 3))
    flag = st.booleans()
    unit = 32 if quant and "-g" in quant else 16
    hidden_unit = unit if quant else 2  # a row ends anywhere
    windowed = draw(st.sampled_from([frozenset(), frozenset({1}), frozenset({0, 1})]))
    return ModelConfig(
        family="llama",
        num_layers=2,
        hidden_size=hidden_unit * draw(st.integers(1, 128 // hidden_unit)),
        ffn_size=unit * draw(st.integers(1, 4)),
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([32, 64])),
        vocab_size=64,
        max_positions=64,
        tied=draw(flag),
        qkv_bias=draw(flag),
        out_bias=draw(flag),
        mlp_bias=draw(flag),
        qk_norm=draw(flag),
        sliding_window=8 if windowed else None,
        windowed_layers=windowed,
    )


def drawn_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Random norms and biases too, so that none can be mistaken for another."""
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for spec in model_specs(config):
        if spec.tied_to is None:
            centre = 1.0 if spec.init.kind == "ones" else 0.0
            weights[spec.name] = (centre + 0.3 * torch.randn(spec.shape, generator=random)).to(BF16)
    return weights


@pytest.mark.parametrize("name", instruction_sets())
@settings(max_examples=examples(10))
@given(data=st.data(), quant=st.sampled_from([None, "int8", "int4z-g32"]), seed=st.integers(0, 99))
def test_random_decoders_are_bit_identical_to_blocks_one_by_one(
    name: str, data: st.DataObject, quant: str | None, seed: int
) -> None:
    config = data.draw(decoders(quant))
    together, apart = (
        runner(config, drawn_weights(config, seed), "auto", quant, name) for _ in range(2)
    )
    check_bits(together, apart)


@pytest.mark.parametrize(
    ("family", "quant", "changes"),
    [
        ("gpt2", None, {"n_embd": 128}),
        ("llama", None, {"hidden_act": "gelu"}),
        ("llama", None, {"intermediate_size": 200}),
        ("llama", "int3-g32", {}),
    ],
)
def test_models_without_native_kernels_run_block_by_block(
    family: str, quant: str | None, changes: dict[str, object]
) -> None:
    made = runner_of_family(family, "auto", quant, instruction_sets()[0], **changes)
    assert isinstance(made.attention, NativePagedAttention) and made.blocks is None
    by_id, _ = made.run(batches()[0])
    (logits,) = by_id.values()
    assert logits.isfinite().all()
