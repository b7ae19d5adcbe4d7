"""The planner against published tables, its own formulas, and what it says."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from shardwise.cli import main
from shardwise.config import ModelConfig
from shardwise.formats.catalogue import CATALOGUE, FoundModel
from shardwise.hardware import DEVICES, Device
from shardwise.layout import Layout, Recompute, Shard
from shardwise.params import model_specs, num_params
from shardwise.plan import plan
from shardwise.plan.activations import MicroBatchShape
from shardwise.plan.ledger import Mode, Precision, serving_ledgers, training_ledgers, unit_sizes
from shardwise.plan.planner import ModePlan
from shardwise.plan.proposal import LEAST_TOKENS, Price, propose, training_option
from shardwise.plan.search import Job
from shardwise.plan.why import count, gb
from shardwise.precision import GradientPrecision
from shardwise.train.resolve import resolve_run
from shardwise.train.settings import to_toml
from tiny_training import build_data, tiny_settings

GB = 10**9
TINY = ModelConfig("llama", 3, 64, 96, 4, 2, 16, 100, 128, tied=True)

# ZeRO (Rajbhandari et al., arXiv 1910.02054), table 1: GB of model states per device at stage 1, 2
# and 3, as printed. The paper rounds small cells and truncates large ones, so each holds to 1 unit
# in its last printed digit.
ZERO_TABLE_1 = {
    ("7.5B", 1): ("120", "120", "120"),
    ("7.5B", 16): ("35.6", "21.6", "7.5"),
    ("7.5B", 256): ("30.4", "15.4", "0.47"),
    ("128B", 4): ("896", "704", "512"),
    ("128B", 64): ("536", "284", "32"),
    ("128B", 1024): ("513", "257", "2"),
    ("1T", 1): ("16000", "16000", "16000"),
    ("1T", 16): ("4750", "2875", "1000"),
    ("1T", 64): ("4187", "2218", "250"),
}


def states_gb(model: str, layout: str) -> float:
    (ledger,) = plan(model, "v100-32gb", mode="train", layout=layout).modes[0].candidates[0].ledger
    return ledger.state_bytes / GB


@pytest.mark.parametrize(("model", "num_gpus"), ZERO_TABLE_1)
def test_zero_paper_table_1(model: str, num_gpus: int) -> None:
    for stage, printed in enumerate(ZERO_TABLE_1[model, num_gpus], start=1):
        unit = 10.0 ** -len(printed.partition(".")[2])
        tolerance = unit + 0.0005 * float(printed)  # a bare count is met within 0.05 %
        assert abs(states_gb(model, f"dp{num_gpus}.z{stage}") - float(printed)) <= tolerance, stage


def test_zero_paper_table_2_first_row() -> None:
    """The largest model whose states fit 64 V100s of 32 GB: 2B without ZeRO, 7.6B, 14.4B and 128B
    with stage 1 to 3."""
    for layout, size, more in (
        ("dp64", "1.99B", "2.01B"),
        ("dp64.z1", "7.6B", "7.7B"),
        ("dp64.z2", "14.4B", "14.5B"),
        ("dp64.z3", "127.9B", "128.1B"),
    ):
        assert states_gb(size, layout) <= 32 < states_gb(more, layout), layout
        assert not plan(more, "v100-32gb", mode="train", layout=layout).fits, layout


@settings(max_examples=examples(40))
@given(
    st.integers(1, 40),
    st.sampled_from(["none", "zero1", "zero2", "zero3"]),
    st.sampled_from(get_args(Precision)),
)
def test_states_are_the_formula_on_padded_units(
    dp: int, shard: Shard, precision: Precision
) -> None:
    layout = Layout(dp=dp, shard=shard)
    (ledger,) = training_ledgers(TINY, layout, precision)
    ranks = layout.shard_size
    padded = sum(math.ceil(size / dp) * dp for size in unit_sizes(TINY, layout).values())
    weight, gradient, optimizer = (2, 2, 12) if precision == "bf16" else (4, 4, 8)
    cut = {"none": (1, 1, 1), "zero1": (1, 1, ranks), "zero2": (1, ranks, ranks)}.get(
        shard, (ranks,) * 3
    )
    assert {row: ledger.rows[row] for row in ("parameters", "gradients", "optimizer", "kv")} == {
        "parameters": padded * weight // cut[0],
        "gradients": padded * gradient // cut[1],
        "optimizer": padded * optimizer // cut[2],
        "kv": 0,
    }


def test_a_shard_group_shards_less_than_all_ranks() -> None:
    rows = [
        training_ledgers(TINY, Layout.parse(text))[0].state_bytes
        for text in ("dp8.z3", "dp8.z3.s4", "dp4.z3")
    ]
    assert rows[0] < rows[1] == rows[2]


@pytest.mark.parametrize("tp", [2, 8, 16])
def test_tensor_parallel_states_follow_the_sharding(tp: int) -> None:
    """Llama-3.1-8B: the rank's share by hand, with one kv head on each rank once they are fewer
    than ranks."""
    c = CATALOGUE["llama-3.1-8b"]
    kv = max(1, c.num_kv_heads // tp) * c.head_dim
    block = c.hidden_size * (2 * c.q_size // tp + 2 * kv + 3 * c.ffn_size // tp) + 2 * c.hidden_size
    held = c.num_layers * block + 2 * c.vocab_size // tp * c.hidden_size + c.hidden_size
    (ledger,) = training_ledgers(c, Layout(tp=tp))
    assert ledger.rows["parameters"] == 2 * held


def test_vocabulary_padding_is_counted() -> None:
    """GPT-2 has 50257 tokens: 25129 rows on each of two ranks."""
    sizes = unit_sizes(CATALOGUE["gpt2"], Layout(tp=2))
    assert sizes["embed"] == 25129 * 768


def test_stages_of_a_pipeline() -> None:
    """Blocks are shared out, and a tied embedding is held by the first stage and the last."""
    layout = Layout.parse("pp3")
    sizes = unit_sizes(TINY, layout)
    held = [ledger.rows["parameters"] // 2 for ledger in training_ledgers(TINY, layout)]
    block = sizes["blocks.0"]
    embed = sizes["embed"]
    final = sizes["final"]
    assert held == [embed + block, block, block + final + embed]


def test_kv_bytes() -> None:
    """OPT-13B's shape keeps 819,200 bytes a token (PagedAttention, section 3), as Llama-2-13B does;
    Llama-3.1-70B keeps 40,960 on each of 8 ranks; Mistral keeps no more than the 257 pages of 16
    tokens that a window of 4,096 spans."""

    def kv(name: str, layout: str, tokens: int) -> int:
        return serving_ledgers(CATALOGUE[name], Layout.parse(layout), tokens)[0].rows["kv"]

    assert kv("llama-2-13b", "dp1", 2048) == 2048 * 819_200
    assert kv("llama-3.1-70b", "tp8", 1) == 40_960
    assert kv("llama-3.1-70b", "tp16", 1) == 40_960  # a kv head is not cut
    assert kv("mistral-7b", "dp1", 4096) == 4096 * 131_072
    assert kv("mistral-7b", "dp1", 32_768) == 257 * 16 * 131_072
    assert kv("llama-2-7b", "dp4", 10) == kv(
        "llama-2-7b", "dp1", 10
    )  # replicas serve their own requests
    one, two = (serving_ledgers(TINY, Layout(), 7, num_requests=n)[0].rows["kv"] for n in (1, 2))
    assert two == 2 * one


def test_why_a_70b_model_does_not_fit_on_one_80_gb_gpu() -> None:
    """70,553,706,496 parameters: 2 bytes each are 141 GB, 16 are 1,129 GB; 8192 x 80 x 274,696
    bytes of activations are 180 GB; 8192 x 327,680 bytes of KV are 2.68 GB."""
    train, serve = plan("llama-3.1-70b", "h100-80gb", 1).modes
    assert [train.fits, serve.fits] == [False, False]
    for said in (
        "141 GB in bf16 (2 bytes each): these alone exceed it",
        "4 + 4 + 4 bytes",
        "847 GB",
        "16 bytes per parameter, 1,129 GB",
        "1 sequence of 8,192 tokens",
        "180 GB of activations",
        "2.19 GB for the logits",
        "1,311 GB, 16.4 times",
        "slack is extra and not included",
    ):
        assert said in str(train.why_not)
    for said in (
        "In inference",
        "141 GB",
        "8,192 tokens adds 2.68 GB",
        "327,680 bytes per token",
        "Together: 144 GB",
    ):
        assert said in str(serve.why_not)
    # without the optimizer the states are 70.6 GB on each of 4 GPUs; with it on each of 16
    assert str(train.smallest_change).startswith(
        "tp4.sp.rc-full with --offload (212 GB of host memory per GPU) on 4 GPUs of this type: "
        "peak of 74.6 GB per GPU, which leaves 10.5 GB of its 85.1 GB free"
    )
    assert (
        "; or without --offload dp2.tp8.z3.sp.rc-full on 16 GPUs of this type (2 nodes of 8): peak "
        "of 73.9 GB"
    ) in str(train.smallest_change)
    assert str(serve.smallest_change).startswith("dp1 with --quant int8 on the same 1 GPU: ")


def test_weights_that_would_fit_are_reported() -> None:
    train, serve = plan("llama-2-7b", "h100-80gb", 1).modes
    assert "13.5 GB in bf16 (2 bytes each): these alone would fit" in str(train.why_not)
    assert (serve.why_not, serve.smallest_change) == (None, None)


def test_fp32_has_no_master_copy() -> None:
    (train,) = plan("llama-2-7b", "h100-80gb", 1, mode="train", precision="fp32").modes
    rows = train.candidates[0].ledger[0].rows
    assert (rows["parameters"], rows["gradients"], rows["optimizer"]) == tuple(
        6_738_415_616 * n for n in (4, 4, 8)
    )
    assert "master" not in str(train.why_not)


def test_the_same_gpus_are_tried_before_more() -> None:
    (train,) = plan("llama-2-7b", "h100-80gb", mode="train", layout="dp8").modes
    assert str(train.smallest_change).startswith(
        "dp8.z1 on the same 8 GPUs: peak of 55 GB per GPU, which leaves 30.1 GB of its 85.1 GB free"
    )
    (serve,) = plan("llama-3.1-70b", "h100-80gb", mode="serve", layout="dp8").modes
    assert str(serve.smallest_change).startswith("tp2 on the same 8 GPUs, 4 servers: ")


@pytest.mark.parametrize(
    ("short", "num_sequences", "expected"),
    [
        ("dp8.z3", 2, "dp8.z3.rc-selective on"),
        ("dp8.z3", 4, "dp8.z3.rc-full on"),
        ("dp8", 2, "dp8.z3.rc-selective on"),
        ("dp8.z3", 64, "dp8.z3.rc-full with --micro-batch 16 on"),
    ],
)
def test_a_requested_layout_keeps_its_sizes(short: str, num_sequences: int, expected: str) -> None:
    """Recompute and ZeRO come first, then smaller micro-batches."""
    (train,) = plan(
        "llama-3.1-8b", "h100-80gb", mode="train", layout=short, micro_batch=num_sequences
    ).modes
    assert str(train.smallest_change).startswith(f"{expected} the same 8 GPUs: ")


@pytest.mark.parametrize(
    ("choices", "num_gpus", "settings"),
    [
        ({"model": "llama-3.1-70b", "gpu": "h100", "gpus": 8}, 8, "--offload"),
        ({"model": "llama-3.1-70b", "gpu": "h100", "gpus": 1, "offload": True}, 4, ""),
        ({"model": "llama-3.1-70b", "gpu": "4090", "gpus": 2}, 16, "--offload"),
        ({"model": "llama-3.1-70b", "gpu": "4090", "gpus": 2}, 56, "or without --offload"),
        ({"model": "llama-3.1-70b", "gpu": "4090", "gpus": 2, "offload": True}, 16, ""),
        ({"model": "qwen2.5-32b", "gpu": "4090", "gpus": 2}, 8, "--offload"),
        ({"model": "qwen2.5-32b", "gpu": "4090", "gpus": 2}, 24, "or without --offload"),
        ({"model": "llama-3.1-70b", "gpu": "4090", "gpus": 2, "mode": "serve"}, 2, "int4-g128"),
        (
            {"model": "llama-3.1-70b", "gpu": "4090", "gpus": 2, "mode": "serve", "seq": 32768},
            2,
            "--quant int4-g128 and --kv-dtype int8",
        ),
    ],
)
def test_questions_of_newcomers(choices: dict[str, Any], num_gpus: int, settings: str) -> None:
    """Only data ranks were searched at first (20, 338, 50, 8 and 4 GPUs), and more GPUs never with
    the optimizer in host memory."""
    (mode,) = plan(**({"mode": "train"} | choices)).modes
    gpus = f"the same {num_gpus} GPU" if num_gpus == choices["gpus"] else f"{num_gpus} GPU"
    assert f" on {gpus}" in str(mode.smallest_change) and settings in str(mode.smallest_change)


@pytest.mark.parametrize("gpus", [1, 8])
def test_the_reasons_know_what_is_offloaded(gpus: int) -> None:
    """70,553,706,496 parameters: 4 bytes each stay on the GPUs, 12 are in host memory."""
    (train,) = plan("llama-3.1-70b", "4090", gpus, mode="train", offload=True).modes
    assert "847 GB in host memory" in str(train.why_not) or "besides AdamW's" in str(train.why_not)
    assert "282 GB" in str(train.why_not) and "1,129 GB" not in str(train.why_not)
    assert "with --offload (52.9 GB of host memory per GPU) on 16" in str(train.smallest_change)


def test_16_gpus_train_70b_with_recompute() -> None:
    (train,) = plan("llama-3.1-70b", "h100", 16, mode="train", recompute="full").modes
    assert train.fits and train.smallest_change is None
    assert "dp2.tp8.z3.sp.rc-full" in {str(each.layout) for each in train.candidates if each.fits}


TINY_SHAPE = ModelConfig("llama", 4, 512, 1024, 8, 4, 64, 8192, 4096)


@settings(max_examples=examples(12))
@given(
    num_gpus=st.sampled_from([1, 2, 3, 4]),
    memory_mb=st.integers(30, 1200),
    seq=st.sampled_from([512, 4096]),
    num_sequences=st.sampled_from([1, 4]),
    offload=st.booleans(),
)
def test_no_layout_that_fits_is_cheaper(
    num_gpus: int, memory_mb: int, seq: int, num_sequences: int, offload: bool
) -> None:
    """Against every product of sizes, ZeRO stages, recompute, sequence parallel, halved
    micro-batches and offload, on these GPUs and on each larger number up to 8 that divides a node,
    but for context ranks of fewer than LEAST_TOKENS."""
    device = Device("small", memory_mb * 10**6, 1e13, 1e11)
    job = Job("train", "tiny", TINY_SHAPE, device, "bf16", seq, num_sequences, offload=offload)
    found = propose(job, num_gpus)
    for number in (num_gpus, *(size for size in (2, 4, 8) if size > num_gpus)):
        offloads = sorted({offload, True})
        prices = [price for each in offloads for price in prices_that_fit(job, number, each)]
        if prices:
            assert found is not None and found.option.price <= min(prices)
            assert found.candidate.peak_bytes <= job.limit_bytes
            return
    assert found is None or found.num_gpus > 8


def prices_that_fit(job: Job, num_gpus: int, offload: bool) -> Iterator[Price]:
    for halvings in range(job.num_sequences.bit_length()):
        changed = replace(job, num_sequences=job.num_sequences >> halvings, offload=offload)
        for layout in every_layout(num_gpus):
            if layout.problems(TINY_SHAPE):
                continue
            if layout.cp > 1 and job.seq_tokens < LEAST_TOKENS * layout.cp:
                continue
            if changed.fits_within(layout, job.limit_bytes):
                yield training_option(changed, layout, False, halvings).price


def every_layout(num_gpus: int) -> Iterator[Layout]:
    sizes = [size for size in range(1, num_gpus + 1) if num_gpus % size == 0]
    for dp, tp, pp, cp in product(sizes, repeat=4):
        if dp * tp * pp * cp != num_gpus:
            continue
        for shard, recompute, parallel in product(
            ("none", "zero1", "zero2", "zero3"), get_args(Recompute), (False, True)
        ):
            yield Layout(
                dp=dp,
                tp=tp,
                pp=pp,
                cp=cp,
                shard=shard,
                recompute=recompute,
                sequence_parallel=parallel,
                schedule="1f1b" if pp > 1 else None,
                microbatches=4 * pp if pp > 1 else 1,
            )


@pytest.mark.parametrize("margin", [0.0, 0.08, 0.5])
def test_a_proposal_leaves_its_margin(margin: float) -> None:
    (train,) = plan("llama-3.1-70b", "h100", 16, mode="train", layout="dp16", margin=margin).modes
    found = propose(train.job, 16)
    assert found is not None
    most = min(80 * GB, 80 * GB / 0.94 * (1 - margin))
    assert found.candidate.peak_bytes <= most
    assert f"free (--margin {margin:g})" in str(train.smallest_change)
    told = train.to_json()["proposal"]
    again = plan(
        "llama-3.1-70b", "h100", told["gpus"], mode="train", layout=told["layout"], margin=margin,
        micro_batch=told["micro_batch"], offload=told["offload"],
    )  # fmt: skip
    assert again.fits and again.modes[0].candidates[0].peak_bytes == told["peak_bytes"]


def test_options_of_training() -> None:
    def rows(**choices: Any) -> dict[str, int]:
        answer = plan("llama-3.1-8b", "h100-80gb", mode="train", **choices).modes[0]
        return answer.candidates[0].ledger[0].rows

    one = rows(seq=2048)
    assert (
        rows(seq=2048, micro_batch=4)["activations"]
        == rows(seq=8192)["activations"]
        == 4 * one["activations"]
    )
    assert rows(seq=8192) == rows()
    for recompute in ("selective", "full"):
        assert rows(recompute=recompute) == rows(layout=f"dp1.rc-{recompute}", recompute=recompute)
    assert rows(recompute="none") == rows()
    both = plan("llama-3.1-8b", "h100-80gb", layout="dp2.tp2", recompute="full").to_json()
    assert both["candidates"][0]["layout"] == "dp2.tp2.rc-full"
    assert both["one_gpu"]["layout"] == "dp1.rc-full"
    assert both["serve"]["candidates"][0]["layout"] == "dp2.tp2"
    searched = (
        plan("llama-3.1-8b", "h100-80gb", 4, mode="train", recompute="selective")
        .modes[0]
        .candidates
    )
    assert {each.layout.recompute for each in searched} == {"selective"}


def test_training_options_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """300 tokens of Llama-2-7B: 32 blocks and the head, or 32 inputs of 4096 in bf16 and the last
    block again."""
    flags = ("--gpu", "h100-80gb", "--layout", "dp8.z3", "--micro-batch", "3", "--seq", "100")
    _, full = run_json(capsys, "llama-2-7b", *flags, "--recompute", "full")
    _, none = run_json(capsys, "llama-2-7b", *flags)
    assert (full["micro_batch"], full["seq"]) == (none["micro_batch"], none["seq"]) == (3, 100)
    assert full["candidates"][0]["layout"] == "dp8.z3.rc-full"
    kept = [each["candidates"][0]["ledger"][0]["rows"]["activations"] for each in (none, full)]
    block = 2 * (8 * 4096 + 3 * 11_008) + 8
    x = 2 * 4096
    head = 2 * 2 * 4096 + 4
    assert kept == [300 * (32 * block + head), 300 * (32 * x + block - x)]
    assert (
        main(["plan", "llama-2-7b", *flags, "--layout", "dp8.rc-full", "--recompute", "none"]) == 2
    )
    assert (
        "has rc-full, so recompute cannot be none; leave one of them out" in capsys.readouterr().err
    )


def test_recompute_on_one_gpu_is_reported() -> None:
    said = {
        "none": "saves what it computes",
        "selective": "saves most of what it computes",
        "full": "saves the input of each block",
    }
    for recompute, words in said.items():
        (train,) = plan("70B", "h100-80gb", mode="train", recompute=recompute, micro_batch=2).modes  # type: ignore[arg-type]
        assert f"A forward pass of 2 sequences of 8,192 tokens {words}" in str(train.why_not)


def test_a_shorter_request_is_a_change_too() -> None:
    """Llama-2-7B in 15 GB: 13,476,831,232 bytes of weights leave room for 2,905 tokens of 524,288
    bytes, and 2,296 within the margin."""
    small = Device("small", 15 * GB, 1e12, 1e11)
    for margin, limit, longest in ((0.06, 15 * GB, 2905), (0.08, 15 * GB / 0.94 * 0.92, 2296)):
        (serve,) = plan("llama-2-7b", small, 1, mode="serve", seq=4096, margin=margin).modes
        assert not serve.fits
        assert (int(limit) - 2 * 6_738_415_616) // 524_288 == longest
        assert str(serve.smallest_change).startswith("dp1 with --kv-dtype int8 on the same 1 GPU: ")
        assert f"; or --seq {longest} with dp1" in str(serve.smallest_change)
    assert plan("llama-2-7b", small, 1, mode="serve", seq=2905).fits
    assert not plan("llama-2-7b", small, 1, mode="serve", seq=2906).fits


def test_no_fit_is_reported() -> None:
    tiny = Device("tiny", 10**6, 1e12, 1e11)
    (serve,) = plan("smollm2-135m", tiny, 1, mode="serve").modes
    said = "No tensor-parallel size that its 9 heads allow fits, even with int4 weights and an int8"
    assert str(serve.smallest_change).startswith(said)
    (train,) = plan("gpt2", Device("nano", 100, 1e12, 1e11), 1, mode="train").modes
    assert str(train.smallest_change).startswith("No layout fits on up to 64 nodes more")


def test_candidates_are_sorted_and_valid() -> None:
    for num_gpus in (1, 2, 3, 6, 8, 64):
        for answer in plan("smollm2-135m", "v100-16gb", num_gpus).modes:
            layouts = [candidate.layout for candidate in answer.candidates]
            assert len(set(layouts)) == len(layouts)
            assert all(
                each.layout.world_size * each.replicas == num_gpus for each in answer.candidates
            )
            assert all(layout.problems(CATALOGUE["smollm2-135m"]) == [] for layout in layouts)
    fits = [candidate.fits for candidate in plan("llama-2-7b", "h100-80gb", 8).modes[0].candidates]
    assert fits == sorted(fits, reverse=True)
    assert any(fits)
    assert not all(fits)
    short = {
        str(candidate.layout)
        for candidate in plan("llama-3.1-8b", "h100-80gb", 16).modes[0].candidates
    }
    assert short > {"dp16", "dp16.z1", "dp16.z2", "dp16.z3", "dp2.tp8.z1.sp", "dp2.tp8.z3.sp"}
    short = {
        str(candidate.layout)
        for candidate in plan("llama-3.1-8b", "h100-80gb", 16).modes[1].candidates
    }
    assert short == {"dp1", "tp2", "tp4", "tp8"}


def test_serving_uses_the_training_layout_where_it_can() -> None:
    both = plan("llama-3.1-8b", "h100-80gb", layout="dp2.tp4").to_json()
    assert both["candidates"][0]["layout"] == both["serve"]["candidates"][0]["layout"] == "dp2.tp4"
    trained = plan("llama-3.1-8b", "h100-80gb", layout="dp2.tp4.z1").to_json()
    assert len(trained["candidates"]) == 1
    served = [(each["layout"], each["replicas"]) for each in trained["serve"]["candidates"]]
    assert served == [("dp1", 8), ("tp2", 4), ("tp4", 2), ("tp8", 1)]


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"gpu": "h1000"}, "did you mean h100-80gb"),
        ({"gpu": "0GB"}, "A size, such as 48GB, works too"),
        ({"margin": 1.0}, "the margin is a share from 0 to below 1, such as 0.08, not 1"),
        ({"gpus_per_node": 0}, "a node has at least 1 GPU, not 0"),
        ({"mode": "serve", "offload": True}, "leave them out with mode serve"),
        ({"model": "lama-2-7b"}, "nearest names are llama-2-7b"),
        ({"gpus": 0}, "at least 1, not 0"),
        ({"mode": "serv"}, "use train or serve"),
        ({"precision": "fp8"}, "use bf16 or fp32"),
        (
            {"seq": 4097},
            "the model's context is 4,096 tokens, so --seq must be 1 to 4096, not 4097",
        ),
        ({"seq": 0}, "so --seq must be 1 to 4096, not 0"),
        ({"layout": "tp7", "gpus": None}, "tp7 does not divide 32 heads"),
        ({"layout": "dp4", "gpus": 8}, "layout dp4 is for 4 GPUs, not 8; --gpus 4 works"),
        ({"layout": "dp4.tp2.z1", "gpus": None, "mode": "serve"}, "dp4.tp2 works"),
        ({"layout": "dp2.xx", "gpus": None}, "'xx' is not a part of a layout"),
        ({"micro_batch": 0}, "micro_batch must be at least 1, not 0"),
        ({"recompute": "some"}, "use none, selective, full"),
        ({"mode": "serve", "micro_batch": 2}, "leave them out with mode serve"),
        ({"mode": "serve", "recompute": "none"}, "leave them out with mode serve"),
        (
            {"layout": "dp1.rc-full", "recompute": "selective"},
            "has rc-full, so recompute cannot be selective",
        ),
        (
            {"layout": "dp1.rc-full", "recompute": "none"},
            "has rc-full, so recompute cannot be none",
        ),
    ],
)
def test_invalid_arguments_are_refused_in_one_sentence(
    choices: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError) as caught:
        plan(**({"model": "llama-2-7b", "gpu": "h100-80gb", "gpus": 1} | choices))  # type: ignore[arg-type]
    assert said in str(caught.value)


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict]:
    code = main(["plan", *args, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_json_keys_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, "llama-2-7b", "--gpu", "h100-80gb", "--gpus", "8")
    assert code == 0
    assert answer["model"] == {
        "name": "llama-2-7b",
        "params": 6_738_415_616,
        "active_params": 6_738_415_616,
        "kv_bytes_per_token": 524_288,
    }
    for part, mode in ((answer, "train"), (answer["serve"], "serve")):
        assert part["mode"] == mode
        for candidate in (*part["candidates"], part["one_gpu"]):
            assert set(candidate) == {
                "layout",
                "replicas",
                "fits",
                "peak_bytes",
                "limit_bytes",
                "ledger",
                "comm_bytes",
                *(["serve"] if mode == "serve" else []),
            }
            assert set(candidate["comm_bytes"]) == {"dp", "tp", "pp", "cp"}
            totals = [sum(stage["rows"].values()) for stage in candidate["ledger"]]
            assert candidate["peak_bytes"] == max(totals)
            assert candidate["limit_bytes"] == 80 * GB
            assert candidate["fits"] == (candidate["peak_bytes"] <= candidate["limit_bytes"])
            for stage in candidate["ledger"]:
                trained = {"activations", "logits"} if mode == "train" else set()
                assert (
                    set(stage["rows"])
                    == {"parameters", "gradients", "optimizer", "buffers", "kv"} | trained
                )
                assert all(isinstance(size, int) for size in stage["rows"].values())
    assert isinstance(answer["why_not"], str)
    assert (answer["smallest_change"], answer["proposal"]) == (None, None)
    assert answer["not_counted"] == ["slack"]
    assert answer["serve"]["not_counted"] == ["activations", "logits", "slack"]
    assert (answer["micro_batch"], answer["seq"]) == (1, 4096)


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    h100 = ("--gpu", "h100-80gb")
    assert run_json(capsys, "llama-2-7b", *h100, "--layout", "dp8.z1")[0] == 0
    assert (
        run_json(capsys, "llama-2-7b", *h100, "--layout", "dp8")[0] == 1
    )  # though dp8.z1 would fit
    assert run_json(capsys, "70B", *h100)[0] == 1
    code, answer = run_json(capsys, "llama-2-7b", *h100, "--mode", "serve")
    assert code == 0
    assert answer["mode"] == "serve"
    assert "serve" not in answer
    assert run_json(capsys, "llama-2-7b", *h100, "--mode", "train")[0] == 1


def test_pipeline_stages_have_a_ledger_each(capsys: pytest.CaptureFixture[str]) -> None:
    _, answer = run_json(capsys, "llama-2-7b", "--gpu", "h100-80gb", "--layout", "z1.dp2.pp4")
    (candidate,) = answer["candidates"]
    assert candidate["layout"] == "dp2.pp4.z1.1f1b"
    assert [stage["stage"] for stage in candidate["ledger"]] == [0, 1, 2, 3]
    embed = 32_000 * 4096
    head = 32_000 * 4096 + 4096
    block = (num_params(model_specs(CATALOGUE["llama-2-7b"])) - embed - head) // 32
    assert answer["not_counted"] == ["slack"]
    assert [bool(stage["rows"]["logits"]) for stage in candidate["ledger"]] == [
        False,
        False,
        False,
        True,
    ]
    _, answer = run_json(
        capsys, "llama-2-7b", "--gpu", "h100-80gb", "--layout", "pp4.interleaved.v2.m4"
    )
    assert answer["not_counted"] == ["slack"]
    held = [stage["rows"]["parameters"] // 2 for stage in candidate["ledger"]]
    assert held == [embed + 8 * block, 8 * block, 8 * block, 8 * block + head]


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-70b", "--gpu", "h100-80gb", "--gpus", "8"]) == 1
    out = capsys.readouterr().out
    for said in (
        "70.6 billion parameters",
        "8 x h100-80gb, 80 GB usable of 85.1 GB each",
        "1,311.31",
        "dp8.z3",
        "tp2",
        "fits",
        "GB are 1e9 bytes",
        "in training slack; in serving activations, logits, slack",
        "1.75P",
        "micro-batches of 1 sequence of 8,192 tokens",
        "75.6 GB over",
        "1,129 GB in all. Sharded over all 8 GPUs that is 141 GB per GPU, more than it can hold.",
        "Its largest row is optimizer, 106 GB.",
    ):
        assert said in " ".join(out.split())
    assert all(len(line) <= 120 for line in out.splitlines())


def test_the_report_names_stages_and_small_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt2", "--gpu", "l4", "--layout", "pp2.l6-6", "--mode", "train"]) == 0
    out = capsys.readouterr().out
    assert "stage" in out
    assert (
        "0.1638" in out
    )  # embedding, positions and 6 of 12 blocks: 81,911,040 parameters of 2 bytes


@given(st.integers(0, 10**16))
def test_sizes_have_at_least_two_digits(num_bytes: int) -> None:
    said = gb(num_bytes)
    assert said.endswith(" GB")
    assert float(said.removesuffix(" GB").replace(",", "")) == pytest.approx(
        num_bytes / 1e9, rel=0.051
    )


def test_words_for_counts() -> None:
    assert [count(n) for n in (70_553_706_496, 134_515_008, 10**12, 999)] == [
        "70.6 billion",
        "135 million",
        "1 trillion",
        "999",
    ]


def test_every_device_has_a_plan() -> None:
    for name, device in DEVICES.items():
        answer = plan("llama-3.1-8b", name, 1, mode="serve").modes[0]
        assert answer.fits == (device.memory_bytes >= 2 * 8_030_261_248 + 8192 * 131_072)


@pytest.mark.parametrize("mode", ["train", "serve", None])
def test_too_many_gpus_is_one_sentence(mode: Mode | None) -> None:
    with pytest.raises(ValueError, match="number of GPUs must be at most 10000000, not 1000000000"):
        plan("smollm2-135m", "v100-16gb", 10**9, mode=mode)


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_run_is_planned_as_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_folder: bool
) -> None:
    """Layout, micro-batch, sequence length, precision, gradients, offload, sizes of the model."""
    changes = {"layout": "dp2.z1.m2", "global_batch": 24, "precision": "bf16", "gradients": "fp32"}
    settings = tiny_settings(build_data(tmp_path), tmp_path / "run", offload="host", **changes)
    file = tmp_path / ("config.toml" if is_folder else "run.toml")
    file.write_text(to_toml(settings))
    source = tmp_path if is_folder else file
    code, answer = run_json(capsys, str(source), "--gpu", "4090")
    (candidate,) = answer["candidates"]
    assert (code, answer["micro_batch"], answer["seq"]) == (0, 6, 16)
    assert (candidate["layout"], answer["model"]["name"]) == ("dp2.z1.m2", "1M")
    config = resolve_run(settings).config
    (planned,) = training_ledgers(
        config, Layout.parse("dp2.z1.m2"), "bf16", "fp32", MicroBatchShape(6, 16), offload=True
    )
    assert candidate["ledger"][0]["rows"] == planned.rows
    assert planned.rows["optimizer"] == 0
    code, answer = run_json(capsys, str(source), "--gpu", "4090", "--layout", "dp4")
    assert (answer["candidates"][0]["layout"], answer["micro_batch"]) == ("dp4", 6)
    code, answer = run_json(capsys, str(source), "--gpu", "4090", "--precision", "fp32")
    assert answer["precision"] == "fp32"


def test_a_run_is_proposed_what_its_global_batch_allows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """9 sequences divide among 1, 3 or 9 data ranks x micro-batches, so `train` takes the proposal;
    the run itself is refused as `train` refuses it."""
    settings = tiny_settings(build_data(tmp_path), tmp_path / "run", global_batch=9)
    file = tmp_path / "run.toml"
    file.write_text(to_toml(settings))
    config = resolve_run(settings).config
    model = FoundModel("tiny", config, "run")

    def planned(memory_bytes: int) -> ModePlan:
        small = Device("small", memory_bytes, 1e12, 1e11)
        (mode,) = plan(model, small, 1, "train", "dp1", 16, "fp32", 9, global_batch=9).modes
        return mode

    mode = planned(planned(10**9).candidates[0].peak_bytes * 2 // 3)
    assert not mode.fits and mode.proposal is not None
    found = mode.proposal.candidate.layout
    assert 9 % (found.dp * found.microbatches) == 0
    assert main(["plan", str(file), "--gpu", "4090", "--layout", "dp2"]) == 2
    assert "9 sequences does not divide among 2 data ranks x 1" in capsys.readouterr().err


def test_requests_fill_what_the_weights_leave() -> None:
    """`max_concurrency`: so many requests fit within the margin, and one more does not; a layout
    that fits only without the margin serves one."""
    for gpu, layout in (("h100-80gb", "tp2"), ("h100-80gb", "tp8"), ("b200-192gb", "tp1")):
        answer = plan("llama-3.1-70b", gpu, layout=layout, mode="serve", seq=32768)
        (candidate,) = answer.to_json()["candidates"]
        rows = candidate["ledger"][0]["rows"]
        number = candidate["serve"]["max_concurrency"]
        limit = DEVICES[gpu].limit_bytes(0.08)
        others = candidate["peak_bytes"] - rows["kv"]
        assert (
            number >= 1
            and others + number * rows["kv"] <= limit < others + (number + 1) * rows["kv"]
        )
    tight = plan(
        "llama-3.1-70b", "rtx-4090", 2, "serve", "tp2", 32768, quant="int4-g128", kv_dtype="int8"
    )
    assert tight.to_json()["candidates"][0]["serve"]["max_concurrency"] == 1
    over = plan("llama-3.1-70b", "rtx-4090", 2, "serve", "tp2")
    assert over.to_json()["candidates"][0]["serve"]["max_concurrency"] == 0


@pytest.mark.parametrize(
    ("layout", "gradients", "bytes_each"),
    [
        ("dp2.m4", "auto", 2), ("dp2.m5", "auto", 4), ("dp2.m5", "same", 2), ("dp2", "fp32", 4),
        ("pp2.1f1b.m8", "auto", 4), ("dp2.z3.m64", "auto", 4),
    ],
)  # fmt: skip
def test_gradients_of_many_micro_batches_take_fp32(
    layout: str, gradients: GradientPrecision, bytes_each: int
) -> None:
    answer = plan("llama-2-7b", "h100-80gb", layout=layout, mode="train", gradients=gradients)
    for stage in answer.to_json()["candidates"][0]["ledger"]:
        rows = stage["rows"]
        assert rows["gradients"] * 2 == rows["parameters"] * bytes_each
