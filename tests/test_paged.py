"""Paged attention against its definition, and invariance to the batch and to chunking."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engines import fill_with_anything
from examples import examples
from shardwise.config import ModelConfig
from shardwise.formats.huggingface.hf_config import from_hugging_face
from shardwise.formats.model_source import read_config
from shardwise.kernels.kv_cache import KVPages, Vectors
from shardwise.kernels.page_table import TokenSpan
from shardwise.kernels.reference.batch_invariant import (
    Head,
    RowWeight,
    agreeing_sizes,
    cancelling,
    head_of,
    row_chunks,
    row_weights,
)
from shardwise.kernels.reference.paged_attention import (
    PagedBatch,
    attention_sizes,
    paged_attention,
    paged_batch,
)
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.layout import Layout
from shardwise.model.transformer import Transformer
from shardwise.params import model_specs
from shardwise.quant.kv_dtype import KvDtype
from smollm2 import smollm2_gguf
from tiny_models import our_weights, tiny_model
from whole_weights import load_weights

DTYPES = (torch.float32, torch.bfloat16)
ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-7}  # absolute, of averages of values below 4
PAGE_TOKENS = 16
Runs = list[list[tuple[int, int]]]  # of each step: (sequence, tokens)


@dataclass
class Drawn:
    """Random sequences with their queries, keys and values [T, heads, C], and their page tables."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    tables: list[tuple[int, ...]]

    @property
    def num_pages(self) -> int:
        return sum(map(len, self.tables)) + 3


def drawn(
    lengths: Sequence[int],
    num_heads: int,
    num_kv: int,
    size: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> Drawn:
    random = torch.Generator().manual_seed(seed)

    def tensors(heads: int) -> list[Tensor]:
        return [torch.randn(n, heads, size, generator=random).to(dtype) for n in lengths]

    counts = [-(-n // PAGE_TOKENS) for n in lengths]
    order = iter((torch.randperm(sum(counts), generator=random) + 3).tolist())
    tables = [tuple(next(order) for _ in range(count)) for count in counts]
    return Drawn(tensors(num_heads), tensors(num_kv), tensors(num_kv), tables)


def over_pages(
    case: Drawn, runs: Runs, window: int | None, kv_dtype: KvDtype = "auto"
) -> list[Tensor]:
    """Attention output [T, H, C] of every sequence, its tokens run in the steps of `runs`. Pages
    are full of NaN at first."""
    _, num_heads, size = case.q[0].shape
    num_kv = case.k[0].shape[1]
    dtype = case.q[0].dtype
    pages = KVPages.empty((num_kv, case.num_pages, PAGE_TOKENS, size), kv_dtype, dtype)
    fill_with_anything(pages)
    sizes = attention_sizes(size, dtype)
    done = [0] * len(case.q)
    out = [torch.empty_like(q) for q in case.q]
    for step in runs:
        places = [(number, slice(done[number], done[number] + count)) for number, count in step]
        spans = [
            TokenSpan(at.start, at.stop - at.start, case.tables[number]) for number, at in places
        ]
        batch = paged_batch(spans, num_heads // num_kv, PAGE_TOKENS, [window], sizes)
        q, k, v = (
            torch.cat([x[number][at] for number, at in places]) for x in (case.q, case.k, case.v)
        )
        pages.keys.write(batch.slots, k)
        pages.values.write(batch.slots, v)
        found = paged_attention(q, pages, batch, window).split([span.num_tokens for span in spans])
        for (number, at), part in zip(places, found, strict=True):
            out[number][at] = part
            done[number] = at.stop
    return out


def definition(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """The softmax of all scores, in fp64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    at = torch.arange(q.shape[1])
    behind = at[:, None] - at
    hidden = (behind < 0) | (behind >= (window or len(at)))
    scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def cut(lengths: Sequence[int], most: int, random: torch.Generator) -> Runs:
    """Steps that run sequences in chunks of up to `most` tokens, each step some of them in some
    order."""
    left = list(lengths)
    runs: Runs = []
    while any(left):
        waiting = [
            number
            for number in torch.randperm(len(left), generator=random).tolist()
            if left[number]
        ]
        step = []
        for number in waiting[: 1 + int(torch.randint(len(waiting), (), generator=random))]:
            count = min(left[number], 1 + int(torch.randint(most, (), generator=random)))
            step.append((number, count))
            left[number] -= count
        runs.append(step)
    return runs


def whole(lengths: Sequence[int]) -> Runs:
    return [[(number, count)] for number, count in enumerate(lengths)]


@settings(deadline=None, max_examples=examples(25))
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (9, 3), (4, 4), (8, 1)]),
    size=st.sampled_from([16, 64, 80]),
    window=st.sampled_from([None, 1, 40, 130, 1000]),
    dtype=st.sampled_from(DTYPES),
    most=st.sampled_from([1, 7, 64, 300]),
    seed=st.integers(0, 1000),
)
def test_attention_matches_definition_and_is_batch_invariant(
    lengths: list[int],
    heads: tuple[int, int],
    size: int,
    window: int | None,
    dtype: torch.dtype,
    most: int,
    seed: int,
) -> None:
    case = drawn(lengths, *heads, size, dtype, seed)
    alone = over_pages(case, whole(lengths), window)
    for q, k, v, found in zip(case.q, case.k, case.v, alone, strict=True):
        error = (found.double() - definition(q, k, v, window)).abs().max().item()
        assert error < ERROR[dtype] * max(1.0, v.abs().max().item())
    random = torch.Generator().manual_seed(seed)
    together = over_pages(case, cut(lengths, most, random), window)
    assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_sequences_decode_together(dtype: torch.dtype) -> None:
    lengths = [*range(3, 700, 41), 128, 129, 256, 257]
    case = drawn(lengths, 9, 3, 64, dtype)
    alone = over_pages(case, whole(lengths), None)
    first = [[(number, count - 1)] for number, count in enumerate(lengths)]
    together = over_pages(case, [*first, [(number, 1) for number in range(len(lengths))]], None)
    assert all(map(torch.equal, alone, together))


def test_masked_slots_do_not_affect_results() -> None:
    """Slots behind a sequence in its last page, and pages of other sequences, may hold anything,
    even NaN."""
    case = drawn([20], 2, 1, 16, torch.float32)
    batch = paged_batch(
        [TokenSpan(0, 20, case.tables[0])],
        2,
        PAGE_TOKENS,
        [None],
        attention_sizes(16, torch.float32),
    )
    found = []
    for garbage in (0.0, torch.nan, torch.inf):
        pages = KVPages(
            *(Vectors(torch.full((1, case.num_pages, PAGE_TOKENS, 16), garbage)) for _ in range(2))
        )
        pages.keys.write(batch.slots, case.k[0])
        pages.values.write(batch.slots, case.v[0])
        found.append(paged_attention(case.q[0], pages, batch, None))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_in", "num_out"), [(64, 96), (576, 960), (1536, 576), (4096, 256), (33, 101)]
)
def test_products_are_batch_invariant(num_in: int, num_out: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(num_in)
    weight = torch.randn(num_out, num_in, generator=random).to(dtype)
    x = torch.randn(300, num_in, generator=random).to(dtype)
    linear = row_weights({"blocks.0.out": weight})["blocks.0.out"]
    head = head_of(weight, dtype)[0]
    assert isinstance(linear, RowWeight)
    expected = x.double() @ weight.double().t()
    scale = expected.abs().max()
    assert (linear.apply(x) - expected).abs().max() < scale * (
        1e-5 if dtype == torch.float32 else 2**-8
    )
    assert (head.apply(x) - expected).abs().max() < scale * (
        1e-5 if dtype == torch.float32 else 2**-16
    )
    for made in (linear, head):
        wanted = made.apply(x)
        for count in (1, 2, 3, 5, 7, 17, 33, 65, 100, 257):
            assert torch.equal(made.apply(x[:count]), wanted[:count])
            assert torch.equal(made.apply(x[-count:]), wanted[-count:])


def test_sizes_that_disagree_are_detected() -> None:
    """The product adds in reverse order for few rows, as libraries do."""
    weight = torch.empty(64, 640, dtype=torch.bfloat16)

    def product(x: Tensor) -> Tensor:
        matrix = cancelling(weight).float()
        x = x.float()
        order = torch.arange(640) if len(x) > 4 else torch.arange(639, -1, -1)
        sums = torch.zeros(len(x), 64)
        for column in order.tolist():
            sums += x[:, column, None] * matrix[:, column]
        return sums.bfloat16()

    assert agreeing_sizes(product, weight) == (8, 16, 24, 32, 48, 64, 128, 256)


@given(
    num_rows=st.integers(1, 2000),
    sizes=st.sets(st.sampled_from([1, 2, 4, 8, 32, 64, 256]), min_size=1),
)
def test_row_chunks_cover_all_rows_in_order(num_rows: int, sizes: set[int]) -> None:
    found = list(row_chunks(num_rows, tuple(sorted(sizes))))
    assert [start for start, _, _ in found] == [
        sum(count for _, count, _ in found[:n]) for n in range(len(found))
    ]
    assert sum(count for _, count, _ in found) == num_rows
    assert all(0 < count <= size and size in sizes for _, count, size in found)


@dataclass(frozen=True)
class Paged:
    """`attend` of a step, as in the runner of a server."""

    config: ModelConfig
    pages: list[KVPages]
    batch: PagedBatch

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pages[layer].keys.write(self.batch.slots, k)
        self.pages[layer].values.write(self.batch.slots, v)
        return paged_attention(q, self.pages[layer], self.batch, self.config.window(layer))


@dataclass(frozen=True)
class Served:
    """A model that runs over pages."""

    config: ModelConfig
    weights: dict[str, Tensor]
    head: Head
    dtype: torch.dtype
    kv_dtype: KvDtype = "auto"

    @torch.inference_mode()
    def run(self, texts: list[list[int]], runs: Runs) -> list[tuple[Tensor, Tensor]]:
        """Hidden states [T, D] and logits [T, V] of each text."""
        config = self.config
        counts = [-(-len(text) // PAGE_TOKENS) for text in texts]
        ends = [sum(counts[: n + 1]) for n in range(len(counts))]
        tables = [
            tuple(range(end - 1, end - 1 - count, -1))
            for end, count in zip(ends, counts, strict=True)
        ]
        shape = config.num_kv_heads, ends[-1], PAGE_TOKENS, config.head_dim
        pages = [KVPages.empty(shape, self.kv_dtype, self.dtype) for _ in range(config.num_layers)]
        for layer in pages:
            fill_with_anything(layer)
        sizes = attention_sizes(config.head_dim, self.dtype)
        windows = [config.window(n) for n in range(config.num_layers)]
        group = config.num_heads // config.num_kv_heads
        done = [0] * len(texts)
        hidden: list[list[Tensor]] = [[] for _ in texts]
        for step in runs:
            spans = [TokenSpan(done[number], count, tables[number]) for number, count in step]
            batch = paged_batch(spans, group, PAGE_TOKENS, windows, sizes)
            tokens = [
                token
                for number, n in step
                for token in texts[number][done[number] : done[number] + n]
            ]
            positions = torch.cat(
                [torch.arange(span.start, span.start + span.num_tokens) for span in spans]
            )
            attend = Paged(config, pages, batch)
            x = Transformer(config, REFERENCE).hidden(
                self.weights, torch.tensor(tokens), positions, attend
            )
            for (number, count), part in zip(
                step, x.split([count for _, count in step]), strict=True
            ):
                hidden[number].append(part)
                done[number] += count
        return [
            (torch.cat(parts), torch.cat([self.head.apply(part) for part in parts]))
            for parts in hidden
        ]


def served(
    config: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype, kv_dtype: KvDtype = "auto"
) -> Served:
    ready = row_weights(weights)
    head = head_of(weights[Transformer(config, REFERENCE).head_name], dtype)[0]
    return Served(config, ready, head, dtype, kv_dtype)  # type: ignore[arg-type]


def ways(texts: list[list[int]]) -> Iterator[Runs]:
    """The ways to run: alone in chunks of 7, token by token, and with other sequences."""
    lengths = [len(text) for text in texts]
    yield [[(0, min(7, lengths[0] - at))] for at in range(0, lengths[0], 7)]
    yield [[(0, 1)]] * lengths[0]
    random = torch.Generator().manual_seed(1)
    yield cut(lengths, 20, random)
    yield [
        [(number, length - 3) for number, length in enumerate(lengths)],
        *[[(n, 1) for n in range(len(texts))]] * 3,
    ]


def assert_same_bits(model: Served, texts: list[list[int]]) -> None:
    hidden, logits = model.run(texts, whole([len(text) for text in texts]))[0]
    assert hidden.isfinite().all()
    for runs in ways(texts):
        used = texts if any(number for step in runs for number, _ in step) else texts[:1]
        found = model.run(used, runs)[0]
        assert torch.equal(found[0], hidden)
        assert torch.equal(found[1], logits)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "llama-biases", "gpt2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_model_is_batch_invariant(name: str, dtype: torch.dtype) -> None:
    theirs = tiny_model(name, dtype)
    model = served(from_hugging_face(theirs.config.to_dict()), our_weights(theirs), dtype)
    random = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 101, (n,), generator=random).tolist() for n in (40, 5, 33, 60, 17)]
    with torch.no_grad():
        expected = theirs(torch.tensor(texts[:1])).logits[0].float()
    logits = model.run(texts[:1], whole([40]))[0][1]
    assert (logits - expected).abs().max() < expected.abs().max() * (
        1e-5 if dtype == torch.float32 else 0.05
    )
    assert_same_bits(model, texts)


def test_smollm2_is_batch_invariant() -> None:
    dtype = torch.bfloat16
    path = smollm2_gguf()
    one = Layout()
    config = read_config(path)
    weights = load_weights(path, config, model_specs(config), one, one.coord(0), dtype)
    random = torch.Generator().manual_seed(0)
    texts = [
        torch.randint(0, config.vocab_size, (n,), generator=random).tolist() for n in (17, 5, 19)
    ]
    assert_same_bits(served(config, weights, dtype), texts)
