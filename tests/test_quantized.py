"""Models loaded quantized: rounded while loading, or as stored in a GGUF file. Bytes, slices and
results."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor

from engines import answers, engine_of, greedy, runner_of
from memory import peak_bytes
from quantized_files import drawn_blocks
from shardwise import LLM, SamplingParams
from shardwise.cli import main
from shardwise.formats.model_source import read_config
from shardwise.formats.storage_formats import quantized_formats
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.layout import Coord, Layout
from shardwise.measure.perplexity import perplexity
from shardwise.measure.reference_model import load_reference_model
from shardwise.model.layers import Causal
from shardwise.model.transformer import Transformer
from shardwise.parallel.mesh import make_mesh
from shardwise.params import ParamSpec, model_specs, stage_units
from shardwise.plan import plan
from shardwise.plan.ledger import Precision, serving_ledgers
from shardwise.quant.format import dequantize, quantize
from shardwise.quant.ggml import BLOCKS
from shardwise.quant.scheme import Scheme, can_stay_quantized, quantizable
from shardwise.quant.weight import QuantizedWeight
from shardwise.quantize.load_quantized import load_quantized
from shardwise.serve.engine.remote import RemoteEngine
from shardwise.serve.engine.runner import Runner
from shardwise.serve.engine.sequence import Batch, BatchEntry
from shardwise.serve.request import Request
from shardwise.serve.settings import EngineSettings
from shardwise.shards import boxes
from smollm2 import smollm2_gguf
from tiny_models import our_weights, tiny_model
from whole_weights import load_weights

KINDS = [kind for kind, block in BLOCKS.items() if block.num_elements > 1]
MIXED = {
    "attn_q": "Q4_K",
    "attn_k": "Q4_K",
    "attn_v": "Q6_K",
    "attn_output": "Q5_K",
    "ffn_gate": "Q4_K",
    "ffn_up": "F16",
    "ffn_down": "Q8_0",
    "token_embd": "Q6_K",
    "output": "Q4_0",
}


def nbytes(weights: Mapping[str, Tensor | QuantizedWeight]) -> int:
    return sum(
        weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes
        for weight in weights.values()
    )


def planned_bytes(path: Path, layout: Layout, quant: str, precision: Precision = "bf16") -> int:
    answer = plan(
        str(path), "h100-80gb", layout=layout, mode="serve", precision=precision, quant=quant
    )
    return answer.modes[0].candidates[0].ledger[0].rows["parameters"]


def write_gguf(path: Path, kinds: dict[str, str], tied: bool = False) -> Path:
    """Write a llama of width 512 with random blocks; `kinds` maps parts of tensor names to
    types."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(512)
    writer.add_feed_forward_length(1024)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(96)
    random = np.random.default_rng(0)
    for number, name in enumerate(("token_embd",) if tied else ("token_embd", "output")):
        raw = drawn_blocks(kinds[name], 96, 512, seed=100 + number).numpy()
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=GGMLQuantizationType[kinds[name]])
    writer.add_tensor("output_norm.weight", np.ones(512, np.float32))
    shapes = {
        "attn_q": (512, 512),
        "attn_k": (256, 512),
        "attn_v": (256, 512),
        "attn_output": (512, 512),
        "ffn_gate": (1024, 512),
        "ffn_up": (1024, 512),
        "ffn_down": (512, 1024),
    }
    for layer in range(2):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(512, np.float32))
        for number, (name, shape) in enumerate(shapes.items()):
            kind = GGMLQuantizationType[kinds[name]]
            if kinds[name] == "F16":
                writer.add_tensor(
                    f"blk.{layer}.{name}.weight",
                    (0.02 * random.normal(size=shape)).astype(np.float16),
                )
            else:
                raw = drawn_blocks(kinds[name], *shape, seed=10 * layer + number).numpy()
                writer.add_tensor(f"blk.{layer}.{name}.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_specs(path: Path) -> list[ParamSpec]:
    return [spec for spec in model_specs(read_config(path)) if spec.tied_to is None]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_a_gguf_file_is_loaded_as_stored(tmp_path: Path, kind: str, tp: int) -> None:
    """Every weight on every rank equals the dequantized one, with q and k in our order; its bytes
    are those of the file and of the plan."""
    kinds = MIXED if kind == "mixed" else dict.fromkeys(MIXED, kind)
    path = write_gguf(tmp_path / "model.gguf", kinds)
    layout = Layout(tp=tp)
    config = read_config(path)
    specs = stored_specs(path)
    total = 0
    for rank in range(tp):
        coord = layout.coord(rank)
        plain = load_weights(path, config, specs, layout, coord, torch.float32)
        kept = load_quantized(path, config, specs, layout, coord, torch.float32, "as-stored")
        for spec in specs:
            held = kept[spec.name]
            assert isinstance(held, QuantizedWeight) == can_stay_quantized(spec)
            local = held.dequantized(torch.float32) if isinstance(held, QuantizedWeight) else held
            assert torch.equal(local, plain[spec.name]), spec.name
        assert nbytes(kept) == planned_bytes(path, layout, "as-stored", "fp32")
        total += sum(held.num_bytes for held in kept.values() if isinstance(held, QuantizedWeight))
    if kind != "mixed":
        stored = gguf.GGUFReader(path).tensors
        assert total == sum(int(each.n_bytes) for each in stored if len(each.shape) == 2)


def test_logits_equal_those_of_dequantized_weights(tmp_path: Path) -> None:
    """The tolerance in fp32 is 1e-5 of the largest, since matmuls are split elsewhere."""
    path = write_gguf(tmp_path / "model.gguf", MIXED)
    config = read_config(path)
    specs = stored_specs(path)
    one = Layout()
    ids = torch.randint(96, (1, 20), generator=torch.Generator().manual_seed(0))
    found = [
        Transformer(config, REFERENCE).forward(
            weights, ids, torch.arange(20)[None], Causal(config, causal_attention)
        )  # type: ignore[arg-type]
        for weights in (
            load_weights(path, config, specs, one, one.coord(0), torch.float32),
            load_quantized(path, config, specs, one, one.coord(0), torch.float32, "as-stored"),
        )
    ]
    assert (found[0] - found[1]).abs().max() <= 1e-5 * found[0].abs().max()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("embedding", ["Q8_0", "Q6_K"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_quantized_embedding_serves_lookups_and_logits(
    tmp_path: Path, dtype: torch.dtype, embedding: str, tied: bool
) -> None:
    """Logits with and without a native product, and with a tied head, are within 1e-5 of the
    largest in fp32 and 0.05 in bf16 of those of a dequantized model."""
    kinds = MIXED | {"token_embd": embedding}
    path = write_gguf(tmp_path / "model.gguf", kinds, tied)
    one = Layout()
    config = read_config(path)
    specs = stored_specs(path)
    assert config.tied == tied
    kept = load_quantized(path, config, specs, one, one.coord(0), dtype, "as-stored")
    runner = Runner(
        config, kept, make_mesh(one, 0, torch.device("cpu"), config.num_kv_heads), dtype, 16
    )
    runner.make_pages(2)
    ids = torch.randint(96, (20,), generator=torch.Generator().manual_seed(0))
    by_id, _ = runner.run(Batch((BatchEntry(0, tuple(ids.tolist()), 0, (1, 0), 1, None),), ()))
    found = by_id[0]
    plain = load_weights(path, config, specs, one, one.coord(0), torch.float32)
    expected = Transformer(config, REFERENCE).forward(
        plain, ids[None], torch.arange(20)[None], Causal(config, causal_attention)
    )[0, -1]
    assert (found - expected).abs().max() <= (
        1e-5 if dtype == torch.float32 else 0.05
    ) * expected.abs().max()


def test_smollm2_as_stored() -> None:
    """The weights of the real model in Q4_1 are bit-identical to the dequantized ones, in a third
    of the bytes."""
    path = smollm2_gguf()
    one = Layout()
    config = read_config(path)
    specs = stored_specs(path)
    kept = load_quantized(path, config, specs, one, one.coord(0), torch.bfloat16, "as-stored")
    plain = load_weights(path, config, specs, one, one.coord(0), torch.bfloat16)
    for name, weight in plain.items():
        held = kept[name]
        assert torch.equal(
            held.dequantized(torch.bfloat16) if isinstance(held, QuantizedWeight) else held, weight
        ), name
    blocks = sum(spec.numel for spec in specs if quantizable(spec))
    embedding = 49152 * 576
    assert blocks == 106_168_320
    saved = 2 * (blocks + embedding) - 20 * blocks // 32 - 34 * embedding // 32
    assert nbytes(kept) == nbytes(plain) - saved == planned_bytes(path, one, "as-stored")


def test_smollm2_log_probabilities_are_near_those_of_dequantized_weights() -> None:
    """The mean difference of log-probabilities is below 0.05. Activations in int8, where products
    are native, cost about as much as bf16, whose products differ by 0.025 from fp32."""
    params = SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=0)
    text = (
        "The capital of France is Paris. " * 3
        + "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12. Water boils at a hundred degrees"
    )
    told = []
    for quant in ("none", "as-stored"):
        llm = LLM(
            str(smollm2_gguf()), quant=quant, kv_bytes=1 << 26, max_len=512, max_batch_tokens=80
        )
        (output,) = llm.generate([text], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        told.append(
            (
                torch.tensor([each.logprob for each in output.prompt_logprobs]),
                output.outputs[0].token_ids[0],
            )
        )
    (plain, first), (kept, kept_first) = told
    assert first == kept_first
    assert (plain - kept).abs().mean() < 0.05


def test_quantized_weights_are_batch_invariant() -> None:
    """A request alone and in a batch with five others (docs/decisions/0004-invariance.md)."""
    model = load_reference_model(smollm2_gguf(), torch.bfloat16, torch.device("cpu"), "as-stored")
    texts = (
        "The capital of France is",
        "a",
        "Once upon a time, in a land far away, there",
        "1, 2, 3",
        "E = mc",
        "def f(",
    )
    requests = [Request(tuple(model.tokenizer.encode(text)), greedy(5)) for text in texts]
    runner = runner_of(model)
    alone = [
        answers(engine_of(runner, model.tokenizer), [request])[0][0].said
        for request in requests[:3]
    ]
    together = answers(engine_of(runner, model.tokenizer), requests)
    assert alone == [got.said for (got,) in together[:3]]


# -- rounded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", vocab_size=264).save_pretrained(path)
    byte_tokenizer().save(path)
    return path


@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "gpt2"])
@pytest.mark.parametrize("quant", ["int8", "int4-g16", "int4z-g16", "int3-g16", "fp8"])
@pytest.mark.parametrize("tp", [1, 2])
def test_shards_are_slices_of_what_one_rank_rounds_to(
    tmp_path: Path, name: str, quant: str, tp: int
) -> None:
    """One scale per row, of which a rank holds a part, is a case too; bytes are those of the
    plan."""
    theirs = tiny_model(name)
    layout = Layout(tp=tp)
    scheme = Scheme.parse(quant)
    theirs.save_pretrained(tmp_path / "model")
    path = tmp_path / "model"
    weights = our_weights(theirs)
    config = read_config(path)
    specs = stored_specs(path)
    for rank in range(tp):
        coord = layout.coord(rank)
        held = load_quantized(path, config, specs, layout, coord, torch.float32, quant)
        assert_slices(held, specs, weights, scheme, layout, coord)
        assert nbytes(held) == planned_bytes(path, layout, quant, "fp32")


def assert_slices(
    held: Mapping[str, Tensor | QuantizedWeight],
    specs: Sequence[ParamSpec],
    weights: Mapping[str, Tensor],
    scheme: Scheme,
    layout: Layout,
    coord: Coord,
) -> None:
    """Assert that shards are slices of the weights, with matrices of blocks quantized unsharded."""
    for spec in specs:
        whole = weights[spec.name]
        mine = held[spec.name]
        if quantizable(spec):
            assert isinstance(mine, QuantizedWeight)
            whole = dequantize(quantize(whole, scheme), torch.float32)
            mine = mine.dequantized(torch.float32)
        assert isinstance(mine, Tensor)
        for box in boxes(spec, layout, coord):
            assert torch.equal(mine[box.local_slices], whole[box.slices]), spec.name


@pytest.mark.parametrize("quant", ["int8", "int4-g16"])
def test_a_stage_holds_its_blocks_and_a_rank_its_slices(tmp_path: Path, quant: str) -> None:
    """Under tp2.pp2 each parameter is on some stage, and a tied embedding on both."""
    theirs = tiny_model("qwen3")
    layout = Layout(tp=2, pp=2, schedule="1f1b")
    scheme = Scheme.parse(quant)
    theirs.save_pretrained(tmp_path / "model")
    path = tmp_path / "model"
    weights = our_weights(theirs)
    config = read_config(path)
    found = Counter[str]()
    for rank in range(layout.world_size):
        coord = layout.coord(rank)
        units = stage_units(config, layout, coord.pp)
        specs = [spec for spec in stored_specs(path) if spec.unit in units]
        held = load_quantized(path, config, specs, layout, coord, torch.float32, quant)
        found.update(held.keys())
        assert_slices(held, specs, weights, scheme, layout, coord)
    assert found == {name: 4 if name == "embed" else 2 for name in weights}


def test_loading_never_holds_more_than_a_layer_unquantized(tmp_path: Path) -> None:
    """Peak memory in bf16 beyond the weights: temporaries of a strip, and a matrix that is
    concatenated."""
    theirs = tiny_model("llama", torch.bfloat16, hidden_size=2048, intermediate_size=4096)
    theirs.save_pretrained(tmp_path / "model")
    path = tmp_path / "model"
    one = Layout()
    config = read_config(path)
    specs = stored_specs(path)
    layer_bytes = 2 * sum(spec.numel for spec in specs if spec.name.startswith("blocks.0."))
    loaded: list[dict[str, Tensor | QuantizedWeight]] = []

    def load() -> None:
        loaded.append(
            dict(load_quantized(path, config, specs, one, one.coord(0), torch.bfloat16, "int4-g64"))
        )

    peak, mapped = peak_bytes(load, tmp_path / "trace.json")
    assert mapped == (path / "model.safetensors").stat().st_size  # which is no memory of ours
    assert nbytes(loaded[0]) <= peak - mapped <= nbytes(loaded[0]) + layer_bytes


def test_two_ranks_generate_what_one_generates(folder: Path) -> None:
    """Greedy decoding in fp32; each rank has its slices of the weights and its heads of the KV
    cache."""
    model = load_reference_model(folder, torch.float32, torch.device("cpu"), "int4-g16")
    request = Request(tuple(range(5, 40)), greedy(8))
    ((wanted,),) = answers(engine_of(runner_of(model, "int8"), model.tokenizer), [request])
    (planned,) = serving_ledgers(model.config, Layout(tp=2), 16, "fp32", kv_dtype="int8")
    said: list[str] = []

    async def tokens() -> list[int]:
        settings = EngineSettings(
            folder, Layout(tp=2), "fp32", kv_bytes=1 << 20, quant="int4-g16", kv_dtype="int8"
        )
        engine = RemoteEngine(settings, model.config, model.tokenizer, said.append)
        await engine.start()
        try:
            return [token async for delta in engine.generate(request) for token in delta.tokens]
        finally:
            await engine.close()

    assert asyncio.run(tokens()) == wanted.tokens
    num_tokens = (1 << 20) // planned.rows["kv"] * 16
    num_requests = num_tokens // model.config.max_positions
    assert any(f"room for {num_requests:,} requests" in line for line in said)


def test_an_engine_generates_with_quantized_weights(folder: Path) -> None:
    """Log-probabilities in fp32 equal those of a forward with the rounded weights to 1e-4."""
    model = load_reference_model(folder, torch.float32, torch.device("cpu"), "int4-g32")
    llm = LLM(str(folder), dtype="fp32", quant="int4-g32", kv_bytes=1 << 20)
    (output,) = llm.generate(
        "abc",
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0),
        use_tqdm=False,
    )
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    with torch.no_grad():
        logits = Transformer(model.config, REFERENCE).forward(
            model.weights,
            torch.tensor([tokens]),
            torch.arange(len(tokens))[None],
            Causal(model.config, causal_attention),
        )
    wanted = logits[0].log_softmax(-1)
    for at, told in enumerate(output.outputs[0].logprobs, start=len(output.prompt_token_ids)):
        assert abs(float(wanted[at - 1, tokens[at]]) - told.logprob) < 1e-4


def test_perplexity_of_rounded_weights(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Perplexity equals that of the dequantized weights to 1e-5 nats, and differs from the float
    model's."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 3)
    model = load_reference_model(folder, torch.float32, torch.device("cpu"))
    tokens = model.tokenizer.encode(text.read_text(), special_tokens=True)
    rounded = {
        spec.name: dequantize(
            quantize(model.weights[spec.name], Scheme.parse("int4-g32")), torch.float32
        )
        for spec in model_specs(model.config)
        if quantizable(spec)
    }
    quantized = replace(model, weights=model.weights | rounded)
    wanted = perplexity(quantized.logits, tokens, 64, 64, lambda done: None)
    plain = perplexity(model.logits, tokens, 64, 64, lambda done: None)
    command = [
        "eval",
        "perplexity",
        str(folder),
        "--data",
        str(text),
        "--dtype",
        "fp32",
        "--quant",
        "int4-g32",
        "--json",
    ]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nll"] == pytest.approx(wanted.nll, abs=1e-5)
    assert abs(found["nll"] - plain.nll) > 1e-4


# -- refused


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--quant", "int4-g128"],
            "groups of 128 columns do not divide the 64 columns of blocks.0.qkv; groups of 32 do",
        ),
        (
            ["--quant", "int4-g32", "--tp", "2"],
            "tp2 does not split the 96 columns of blocks.0.down at multiples of groups of 32",
        ),
        (["--quant", "int5"], "unknown quantization scheme 'int5'; did you mean int8?"),
        (["--quant", "gptq"], "gptq is a method of `convert`: --method gptq --quant int4-g64"),
        (
            ["--quant", "as-stored"],
            "is not quantized, so as-stored does not apply; int8 or int4-g64 quantizes it",
        ),
        (
            ["--quant", "int8", "--tp", "2", "--max-len", "65"],
            "max_len is 65, but the model's context length is 64",
        ),
    ],
)
def test_a_server_refuses_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str
) -> None:
    assert main(["serve", str(folder), "--port", "0", *flags]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_quantizing_a_quantized_model_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"is already quantized \(Q4_1, Q8_0\); use --quant as-stored"
    ):
        LLM(str(smollm2_gguf()), quant="int4-g64")


def test_blocks_that_shards_would_split(tmp_path: Path) -> None:
    """Q6_K has blocks of 256 columns: four ranks would have half a block each of 512 columns."""
    path = write_gguf(tmp_path / "model.gguf", dict.fromkeys(MIXED, "Q6_K"))
    with pytest.raises(
        ValueError,
        match=r"tp4 does not split the 512 columns of blocks\.0\.out at multiples of groups of "
        r"256 columns; tp 1 and 2 work",
    ):
        quantized_formats(path, read_config(path), Layout(tp=4), "as-stored")


def test_training_does_not_support_quantized_weights(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("text")
    assert (
        main(
            [
                "eval",
                "logprobs",
                str(folder),
                "--data",
                str(tmp_path / "text.txt"),
                "--quant",
                "int8",
            ]
        )
        == 2
    )
    assert "--quant is a flag of `eval perplexity`" in capsys.readouterr().err


# -- planned


def test_plan_of_published_shapes() -> None:
    """Llama 3.1 70B in int4-g128: 68.45e9 weights in blocks at 4 + 16 / 128 bits, 2.10e9 others at
    2 bytes."""
    answer = plan("llama-3.1-70b", "h100-80gb", mode="serve", quant="int4-g128")
    blocks = 80 * (8192 * 10240 + 8192 * 8192 + 3 * 8192 * 28672)
    others = 2 * 128256 * 8192 + 161 * 8192
    assert (
        answer.modes[0].candidates[0].ledger[0].rows["parameters"]
        == blocks * (4 + 16 / 128) / 8 + 2 * others
    )
    assert answer.fits and answer.to_json()["quant"] == "int4-g128"
    assert not plan("llama-3.1-70b", "h100-80gb", mode="serve").fits


def test_plan_proposes_only_layouts_that_groups_allow() -> None:
    """T26: 29568 / 128 = 231 groups, an odd number of them; 29568 / 32 = 924 is 4 x 231."""
    layouts = (
        plan("qwen2.5-72b", "h100-80gb", gpus=8, mode="serve", quant="int4-g128")
        .modes[0]
        .candidates
    )
    assert [str(each.layout) for each in layouts] == ["dp1"]
    found = (
        plan("qwen2.5-72b", "h100-80gb", gpus=8, mode="serve", quant="int4-g32").modes[0].candidates
    )
    assert {each.layout.tp for each in found} == {1, 2, 4}
    with pytest.raises(ValueError, match="tp8 does not split the 29568 columns"):
        plan("qwen2.5-72b", "h100-80gb", layout="tp8", mode="serve", quant="int4-g128")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--mode", "train", "--quant", "int8"], "quant applies to serving only"),
        (
            ["--quant", "as-stored"],
            "this shape without weights is not quantized, so as-stored does not apply",
        ),
        (["--quant", "int4-g7"], "the group size must be a multiple of 8, not 7"),
    ],
)
def test_invalid_plans(capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str) -> None:
    assert main(["plan", "llama-3.1-8b", "--gpu", "h100-80gb", *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_a_plan_reports_what_is_quantized(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "llama-3.1-405b", "--gpu", "h100-80gb", "--mode", "serve", "--quant", "int8"])
        == 1
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "Serving in bf16, block matrices in int8" in said
    assert (
        "with the matrices of its blocks in int8 and the rest in bf16 (2 bytes each): these alone "
        "exceed it" in said
    )
