"""An 8-bit KV cache: codes, attention over them, batch invariance, and bytes."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engines import answers, drawn_tokens, engine_of, greedy, runner_of, tiny
from examples import examples
from shardwise.cli import main
from shardwise.formats.catalogue import CATALOGUE
from shardwise.formats.huggingface.hf_config import from_hugging_face
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.kernels.kv_cache import CODES, FP8_NORMAL, quantize_vectors
from shardwise.layout import Layout
from shardwise.parallel.launch import Place
from shardwise.plan import plan
from shardwise.plan.ledger import serving_ledgers
from shardwise.quant.kv_dtype import KvDtype, check_kv_dtype
from shardwise.serve.engine.scheduler import Limits
from shardwise.serve.engine.worker import start_rank
from shardwise.serve.llm import LLM
from shardwise.serve.request import Request, SamplingParams
from shardwise.serve.settings import EngineSettings
from test_paged import (
    DTYPES,
    PAGE_TOKENS,
    assert_same_bits,
    cut,
    definition,
    drawn,
    over_pages,
    served,
    whole,
)
from tiny_models import our_weights, tiny_model

CPU = torch.device("cpu")
KV_DTYPES: tuple[KvDtype, ...] = ("int8", "fp8")
STEP = {"int8": 0.5 / 127, "fp8": 2.0**-4}
"""Of rounding: of the largest of a vector, and of each number."""


def kept(x: Tensor, kv_dtype: KvDtype) -> Tensor:
    """The vectors [..., C] that pages return, in fp64."""
    codes, scales = quantize_vectors(x, CODES[kv_dtype])
    return codes.double() * scales.double()[..., None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", vocab_size=264).save_pretrained(path)
    byte_tokenizer().save(path)
    return path


# -- codes


@settings(max_examples=examples(30))
@given(seed=st.integers(0, 99), size=st.sampled_from([1, 16, 80]), power=st.integers(-30, 30))
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_codes_are_nearest(kv_dtype: KvDtype, seed: int, size: int, power: int) -> None:
    x = torch.randn(7, 3, size, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    error = (kept(x, kv_dtype) - x).abs()
    largest = x.double().abs().amax(-1, keepdim=True)
    slack = 1 + 1e-5  # of fp32
    if kv_dtype == "int8":
        assert (error <= largest * STEP["int8"] * slack).all()
    else:  # below FP8_NORMAL there is only zero
        assert (
            error
            <= torch.maximum(x.double().abs() * STEP["fp8"], largest * FP8_NORMAL / 448) * slack
        ).all()
    codes, _ = quantize_vectors(x, CODES[kv_dtype])
    floats = codes.float().abs()
    assert (floats.amax(-1) == (127 if kv_dtype == "int8" else 448)).all(), (
        "the largest has the largest code"
    )
    assert kv_dtype == "int8" or ((floats == 0) | (floats >= FP8_NORMAL)).all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_vectors_of_zeros_tiny_and_non_finite_numbers(kv_dtype: KvDtype) -> None:
    """Zeros stay zeros, non-finite vectors stay non-finite, and tiny numbers stay small."""
    x = torch.zeros(4, 8)
    x[1, 3] = torch.nan
    x[2, 3] = torch.inf
    x[3] = 1e-45
    found = kept(x, kv_dtype)
    assert (found[0] == 0).all()
    assert not found[1, 3].isfinite() and not found[2, 3].isfinite()
    assert (found[3].abs() <= 1e-42).all()


# -- attention


@settings(deadline=None, max_examples=examples(6))
@given(
    lengths=st.lists(st.integers(1, 280), min_size=1, max_size=2),
    heads=st.sampled_from([(1, 1), (9, 3), (8, 1)]),
    size=st.sampled_from([16, 64, 80]),
    window=st.sampled_from([None, 1, 40, 130]),
    dtype=st.sampled_from(DTYPES),
    kv_dtype=st.sampled_from(KV_DTYPES),
    most=st.sampled_from([1, 7, 64]),
    seed=st.integers(0, 1000),
)
def test_attention_over_codes_matches_definition_and_is_batch_invariant(
    lengths: list[int],
    heads: tuple[int, int],
    size: int,
    window: int | None,
    dtype: torch.dtype,
    kv_dtype: KvDtype,
    most: int,
    seed: int,
) -> None:
    """The error is within 3e-6 of the largest value in fp32, and 2^-7 in bf16, which rounds weights
    and results."""
    case = drawn(lengths, *heads, size, dtype, seed)
    alone = over_pages(case, whole(lengths), window, kv_dtype)
    for q, k, v, found in zip(case.q, case.k, case.v, alone, strict=True):
        error = (
            (found.double() - definition(q, kept(k, kv_dtype), kept(v, kv_dtype), window))
            .abs()
            .max()
            .item()
        )
        assert error < (3e-6 if dtype == torch.float32 else 2**-7) * max(1.0, v.abs().max().item())
    random = torch.Generator().manual_seed(seed)
    together = over_pages(case, cut(lengths, most, random), window, kv_dtype)
    assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.float32, "int8"), (torch.bfloat16, "fp8")])
@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_tiny_model_is_batch_invariant(name: str, dtype: torch.dtype, kv_dtype: KvDtype) -> None:
    theirs = tiny_model(name, dtype)
    model = served(from_hugging_face(theirs.config.to_dict()), our_weights(theirs), dtype, kv_dtype)
    random = torch.Generator().manual_seed(0)
    assert_same_bits(
        model, [torch.randint(0, 101, (n,), generator=random).tolist() for n in (40, 5, 60)]
    )


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 16), (torch.bfloat16, 16), (torch.bfloat16, 32)]
)  # the native kernels take the last
def test_engine_is_invariant_to_prefix_hits_preemption_and_batch(
    dtype: torch.dtype, head_dim: int, kv_dtype: KvDtype
) -> None:
    """This includes several completions of one prompt, which share its pages and copy the last one.
    Log-probabilities are within 0.1 of those with an unquantized cache."""
    model = tiny("llama", dtype, head_dim=head_dim)
    runner = runner_of(model, kv_dtype)
    shared = drawn_tokens(20, 7)
    requests = [Request((*shared, *drawn_tokens(3 + 4 * n, n)), greedy(24)) for n in range(5)]
    requests.append(
        Request((*shared, 1, 2), SamplingParams(seed=3, n=3, max_tokens=14, logprobs=1))
    )
    alone = [
        [got.said for got in answers(engine_of(runner, model.tokenizer), [request])[0]]
        for request in requests
    ]
    engine = engine_of(runner, model.tokenizer, 7, Limits(33, 8, 64))
    assert [[got.said for got in each] for each in answers(engine, requests)] == alone
    assert engine.scheduler.counters().num_preemptions > 0
    again = answers(engine, requests[-1:])
    assert again[0][0].num_cached == 16 and [got.said for got in again[0]] == alone[-1]
    plain = answers(engine_of(runner_of(model), model.tokenizer), requests[:1])[0][0]
    _, tokens, logprobs, _ = alone[0][0]
    num_same = next((n for n in range(24) if tokens[n] != plain.tokens[n]), 23) + 1
    assert max(abs(logprobs[n].logprob - plain.logprobs[n].logprob) for n in range(num_same)) < 0.1


# -- bytes


@pytest.mark.parametrize("kv_dtype", get_args(KvDtype))
def test_page_bytes_match_the_plan(kv_dtype: KvDtype) -> None:
    """Allocated tensors, the runner's count, the planner's row and its bytes per token agree to the
    byte."""
    model = tiny("llama")
    num_pages = 3
    runner = runner_of(model, kv_dtype)
    runner.make_pages(num_pages)
    held = sum(tensor.nbytes for pages in runner.pages for tensor in pages.tensors)
    assert held == num_pages * runner.page_bytes
    (ledger,) = serving_ledgers(
        model.config, Layout(), num_pages * PAGE_TOKENS, "fp32", kv_dtype=kv_dtype
    )
    assert ledger.rows["kv"] == held
    told = plan(
        model.config, "h100-80gb", mode="serve", precision="fp32", kv_dtype=kv_dtype
    ).to_json()
    assert told["model"]["kv_bytes_per_token"] * num_pages * PAGE_TOKENS == held
    assert told["kv_dtype"] == kv_dtype


def test_kv_bytes_of_published_models() -> None:
    """Llama 3.1 70B has 80 layers and 8 kv heads of 128: one byte per number and four per scale,
    where bf16 has two per number."""
    config = CATALOGUE["llama-3.1-70b"]

    def kv(layout: str, kv_dtype: KvDtype) -> int:
        return serving_ledgers(config, Layout.parse(layout), 1, kv_dtype=kv_dtype)[0].rows["kv"]

    assert (
        kv("dp1", "int8")
        == kv("dp1", "fp8")
        == 2 * 80 * 8 * (128 + 4)
        == kv("dp1", "auto") * 132 // 256
    )
    assert kv("tp8", "int8") == kv("tp16", "int8") == 2 * 80 * (128 + 4)  # a kv head is not cut
    longer = plan("llama-3.1-8b", "rtx-4090", mode="serve", seq=65536, kv_dtype="int8")
    assert longer.fits and not plan("llama-3.1-8b", "rtx-4090", mode="serve", seq=65536).fits


def test_number_of_pages_follows_from_memory(folder: Path) -> None:
    given = 1 << 18
    found = {
        kv_dtype: start_rank(
            Place(0, 1, CPU),
            EngineSettings(folder, dtype="bf16", kv_bytes=given, kv_dtype=kv_dtype),
        )
        for kv_dtype in get_args(KvDtype)
    }
    for kv_dtype, started in found.items():
        assert started.num_pages == given // started.runner.page_bytes
        assert started.runner.page_bytes == PAGE_TOKENS * 2 * 2 * 2 * (
            16 + 4 if kv_dtype != "auto" else 32
        )


# -- commands


def test_llm_accepts_kv_dtype(folder: Path) -> None:
    asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = [
        LLM(str(folder), kv_bytes=1 << 20, kv_dtype=kv_dtype)
        .generate("abc", asked, use_tqdm=False)[0]
        .outputs[0]
        for kv_dtype in get_args(KvDtype)
    ]
    assert all(len(output.token_ids) == 8 for output in found)


def test_invalid_kv_dtypes_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        ["serve", str(folder), "--port", "0"],
        ["plan", "llama-3.1-8b", "--gpu", "h100-80gb"],
    ):
        assert main([*command, "--kv-dtype", "int4"]) == 2
        said = capsys.readouterr().err
        assert "'int4'" in said and said.count("\n") == 1
        assert all(kv_dtype in said for kv_dtype in get_args(KvDtype))
    with pytest.raises(ValueError, match=r"'int4'; known are auto, int8, fp8$"):
        check_kv_dtype("int4")
    with pytest.raises(ValueError, match="kv_dtype applies to serving only"):
        plan("llama-3.1-8b", "h100-80gb", mode="train", kv_dtype="fp8")


def test_plan_reports_kv_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpu", "h100-80gb", "--mode", "serve", "--kv-dtype", "fp8"]
    assert main(["plan", "llama-3.1-70b", *flags]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "Serving in bf16, KV cache in fp8, one request" in said
    assert (
        "(168,960 bytes per token: keys and values of 80 layers x 8 KV heads x 128 in fp8, "
        "each with a scale)"
    ) in said
