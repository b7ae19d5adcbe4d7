"""The gradient of an embedding lookup against its definition in fp64, for rare and frequent
rows."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout import Layout
from shardwise.model.layers import look_up
from shardwise.parallel.apply import apply
from shardwise.parallel.mesh import make_mesh
from shardwise.train.data.batches import Batch, MicroBatch
from shardwise.train.loop import take_step
from tiny_training import FAMILIES, OPTIMIZER, fill_store, seeded, tiny_weights


@pytest.mark.parametrize("sparse_grad", [True, False])
@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 2**31))
def test_rows_and_gradient_are_those_of_torch(
    sparse_grad: bool, num_rows: int, num_ids: int, seed: int
) -> None:
    """Gradients in fp32 are within 1e-5 of torch's in fp64; rows that are not looked up have
    none."""
    ids = torch.randint(num_rows, (2, num_ids), generator=seeded(seed))
    weight = torch.randn(num_rows, 3, generator=seeded(seed)).requires_grad_()
    dy = torch.randn(2, num_ids, 3, generator=seeded(seed + 1))
    rows = look_up(ids, weight, sparse_grad)
    assert torch.equal(rows, F.embedding(ids, weight))
    (grad,) = torch.autograd.grad(rows, [weight], dy)
    assert grad.is_sparse == sparse_grad
    wide = weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(F.embedding(ids, wide), [wide], dy.double())
    torch.testing.assert_close(
        grad.to_dense() if sparse_grad else grad, expected.float(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("count", [16, 1024, 16384])
def test_gradients_of_a_frequent_row_are_summed_in_fp32(count: int) -> None:
    """The error is one rounding to bf16, 2^-9; a sum in bf16 would be 70 % off at 16384."""
    weight = torch.zeros(3, 8, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.rand(count, 8, generator=seeded(count)).bfloat16()
    (grad,) = torch.autograd.grad(
        look_up(torch.ones(count, dtype=torch.long), weight, True), [weight], dy
    )
    torch.testing.assert_close(grad.to_dense()[1].double(), dy.double().sum(0), rtol=2**-8, atol=0)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2"])
def test_bf16_gradients_of_an_embedding_are_near_fp32(family: str) -> None:
    """2048 tokens with only three ids: gradients are within 3 % of fp32; a sum in bf16 would be
    about 30 % off."""
    config = FAMILIES[family]
    grads = []
    tokens = torch.randint(3, (64, 33), generator=seeded(1))
    positions = torch.arange(32).expand(64, -1)
    for dtype in (torch.float32, torch.bfloat16):
        mesh = make_mesh(Layout(), 0, torch.device("cpu"))
        program = apply(config, mesh, dtype, dtype, OPTIMIZER.update)
        fill_store(
            program.store, {name: w.bfloat16().float() for name, w in tiny_weights(config).items()}
        )
        batch = MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, None)
        take_step(program, mesh, Batch((batch,), 64 * 32), 0.0, 0.0)
        grads.append(
            {
                spec.name + box.part: view.double()
                for spec, box, view in program.store.owned("gradient")
            }
        )
    exact, rounded = grads
    for name in exact.keys() & {"embedembed", "positionspositions"}:
        assert float((rounded[name] - exact[name]).norm()) < 3e-2 * float(exact[name].norm()), name
