"""All blocks of a decoder in one native call: the bits of the same blocks run one by one."""

import pytest
import torch

from engines import fill_with_anything, runner_of, tiny
from shardwise.kernels.choice import native_kernels
from shardwise.kernels.native import instruction_sets
from shardwise.layout import Layout
from shardwise.parallel.mesh import make_mesh
from shardwise.params import model_specs
from shardwise.quant.cache import KvDtype
from shardwise.quant.format import quantize
from shardwise.quant.scheme import Scheme, quantizable
from shardwise.quant.weight import QuantizedWeight
from shardwise.serve.batch import Batch, Part
from shardwise.serve.runner import Runner

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not built: no compiler")

CPU, BF16 = torch.device("cpu"), torch.bfloat16
WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


def runner(family: str, kv_dtype: KvDtype, quant: str | None, name: str, **changes: object) -> Runner:
    model = tiny(family, BF16, **WIDE, **changes)
    weights = dict(model.weights)
    for spec in model_specs(model.config) if quant else ():
        if quantizable(spec):
            weights[spec.name] = QuantizedWeight((quantize(weights[spec.name].float(), Scheme.parse(quant)),))
    mesh = make_mesh(Layout(), 0, CPU, model.config.num_kv_heads)
    made = Runner(model.config, weights, mesh, BF16, 16, native_kernels(name), kv_dtype)
    made.make_pages(16)
    for pages in made.pages:
        fill_with_anything(pages)
    return made


def batches() -> list[Batch]:
    """A prompt, then another beside a token of the first, then a token of both."""
    first, second = tuple(range(40)), tuple(range(7, 30))
    return [
        Batch((Part(0, first, 0, (3, 1, 2), 1, 0),), ()),
        Batch((Part(0, (5,), 40, (3, 1, 2), 1, None), Part(1, second, 0, (0, 5), 1, None)), ()),
        Batch((Part(0, (6,), 41, (3, 1, 2), 1, None), Part(1, (9,), 23, (0, 5), 1, None)), ()),
    ]


@pytest.mark.parametrize("name", instruction_sets())
@pytest.mark.parametrize(
    ("family", "kv_dtype", "quant"),
    [
        ("llama", "auto", None),
        ("llama-tied", "int8", "int8"),
        ("mistral", "auto", "int4z-g32"),
        ("llama", "fp8", "int4-g64"),
    ],
)
def test_the_bits_are_those_of_blocks_run_one_by_one(
    family: str, kv_dtype: KvDtype, quant: str | None, name: str
) -> None:
    together, apart = runner(family, kv_dtype, quant, name), runner(family, kv_dtype, quant, name)
    assert together.blocks is not None
    apart.blocks = None
    for batch in batches():
        found, expected = together.run(batch), apart.run(batch)
        assert found.scores == expected.scores
        for id, logits in expected.logits.items():
            assert torch.equal(found.logits[id], logits)


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "qwen3"])
def test_what_has_no_kernel_is_run_block_by_block(family: str) -> None:
    model = tiny(family, BF16)
    assert runner_of(model, kernels=native_kernels(instruction_sets()[0])).blocks is None
