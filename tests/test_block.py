"""The table of a block's parameters, and that everything that depends on it agrees with it."""

import ast
import inspect
import textwrap
from dataclasses import fields, replace

import pytest
import torch

from shardwise.block import BLOCK, MATRICES, block_params, is_block_matrix, part_rows
from shardwise.kernels.native.decoder import SUPPORTED
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.model.layers import Causal
from shardwise.model.transformer import BlockWeights, Transformer
from shardwise.params import block_specs, model_specs
from shardwise.quant.scheme import quantizable
from tiny_training import FAMILIES, tiny_weights

NAMES = {param.name for param in BLOCK}


def test_block_weights_have_the_parameters_of_the_table() -> None:
    """A parameter without a field, or a field without a row, fails here."""
    assert {field.name for field in fields(BlockWeights)} == NAMES
    always = {param.name for param in BLOCK if param.flag is None}
    required = {field.name for field in fields(BlockWeights) if field.default is not None}
    assert required == always, "fields without default are those that all models have"


def test_a_block_computes_with_every_parameter() -> None:
    """`Transformer.block` reads w.NAME for every row."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Transformer.block)))
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "w"
    }
    assert read == NAMES


def test_rows_of_the_table_are_consistent() -> None:
    order = {param.name: index for index, param in enumerate(BLOCK)}
    assert len(order) == len(BLOCK)
    for param in BLOCK:
        if param.fold is not None:
            assert order[param.fold.param] < order[param.name], "inputs are produced before"
            target = BLOCK[order[param.fold.param]]
            parts = {part.name for part in target.parts}
            assert param.fold.part in parts if target.kind == "matrix" else not param.fold.part
        if param.kind == "bias" and param.parts:
            assert param.parts == BLOCK[order[param.name.removesuffix("_bias")]].parts
    saved = [each.name for param in BLOCK for each in param.saved]
    assert len(set(saved)) == len(saved)


def test_the_native_decoder_supports_every_parameter_of_llama() -> None:
    for name in ("llama", "mistral", "qwen2", "qwen3"):
        assert {param.name for param in block_params(FAMILIES[name])} <= SUPPORTED


@pytest.mark.parametrize("name", FAMILIES)
def test_a_weight_that_no_block_uses_is_an_error(name: str) -> None:
    config = FAMILIES[name]
    weights = tiny_weights(config)
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    model = Transformer(config, REFERENCE)
    attend = Causal(config, causal_attention)
    given = (tokens, torch.arange(2)[None], attend)
    more = {**weights, "blocks.1.norm3": torch.ones(config.hidden_size)}
    with pytest.raises(ValueError, match=r"^block 1 has unknown weights: norm3$"):
        model.forward(more, *given)
    with pytest.raises(ValueError, match=r"^block 1 has unknown weights: norm3$"):
        BlockWeights.of(more, 1)
    fewer = {key: weight for key, weight in weights.items() if key != "blocks.0.down"}
    with pytest.raises(ValueError, match=r"^block 0 lacks weights: down$"):
        model.forward(fewer, *given)
    assert model.forward(weights, *given).shape[-1] == config.vocab_size


def test_parts_of_a_gated_and_of_an_ungated_mlp() -> None:
    config = FAMILIES["llama"]
    f = config.ffn_size
    assert part_rows(config, "gate_up", "up") == slice(f, 2 * f)
    plain = replace(config, gated=False)
    assert part_rows(plain, "gate_up", "up") == slice(0, f)
    with pytest.raises(KeyError, match="gate_up has no part gate"):
        part_rows(plain, "gate_up", "gate")


@pytest.mark.parametrize("name", FAMILIES)
def test_specs_follow_the_table(name: str) -> None:
    config = FAMILIES[name]
    specs = {spec.short_name: spec for spec in block_specs(config, 0)}
    assert list(specs) == [param.name for param in block_params(config)]
    for param in block_params(config):
        spec = specs[param.name]
        assert (spec.kind, spec.dims) == (param.kind, param.dims)
        assert quantizable(spec) == (param.name in MATRICES) == is_block_matrix(spec.name)
        for part, (rows, *_) in spec.part_slices():
            if spec.parts:
                assert rows == part_rows(config, param.name, part.name)
    others = [spec for spec in model_specs(config) if spec.layer is None]
    assert not any(quantizable(spec) or is_block_matrix(spec.name) for spec in others)
