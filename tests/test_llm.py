"""LLM, in the shape that vLLM's users know: what comes back, in which order, and what it leaves
behind."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from engines import assert_empty
from shardwise import LLM, SamplingParams
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.layout import Layout
from shardwise.serve.keywords import VLLM_NAMES
from shardwise.serve.settings import EngineSettings
from smollm2 import smollm2_gguf
from tiny_models import tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", vocab_size=264, max_position_embeddings=256).save_pretrained(path)
    byte_tokenizer().save(path)
    return path


@pytest.fixture(scope="module")
def made(folder: Path) -> LLM:
    return LLM(
        str(folder),
        dtype="fp32",
        kv_bytes=1 << 20,
        max_batch_tokens=64,
        max_running=6,
        max_queued=3,
    )


@pytest.fixture
def llm(made: LLM) -> Any:
    yield made
    assert_empty(made.engine)


def test_smollm2_completes_chats_and_streams() -> None:
    llm = LLM(str(smollm2_gguf()), kv_bytes=1 << 28)
    prompts = ["The capital of France is", "1, 2, 3, 4,"]
    paris, count = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert (paris.prompt, paris.prompt_token_ids) == (
        prompts[0],
        llm.engine.tokenizer.encode(prompts[0]),
    )
    assert "Paris" in paris.outputs[0].text and "5, 6" in count.outputs[0].text
    assert (
        paris.finished
        and paris.outputs[0].finish_reason == "length"
        and len(paris.outputs[0].token_ids) == 8
    )
    (chatted,) = llm.chat(
        [{"role": "user", "content": "What is the capital of Germany?"}], GREEDY, use_tqdm=False
    )
    assert chatted.prompt is None and "Berlin" in chatted.outputs[0].text
    streamed = [delta.text for _, delta in llm.stream(prompts[0], GREEDY)]
    assert len(streamed) > 2 and "".join(streamed) == paris.outputs[0].text
    assert_empty(llm.engine)


def test_outputs_are_in_the_order_of_prompts(llm: LLM) -> None:
    """More prompts than may wait or run; each with parameters of its own."""
    prompts = [f"prompt {number}" for number in range(12)]
    params = [
        SamplingParams(temperature=0, max_tokens=20 - number, ignore_eos=True)
        for number in range(12)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [
        20 - number for number in range(12)
    ]
    for prompt, mine, output in zip(prompts, params, outputs, strict=True):
        assert llm.generate(prompt, mine, use_tqdm=False)[0].outputs == output.outputs


def test_the_queue_is_never_longer_than_it_may_be(llm: LLM) -> None:
    most = 0
    for _, delta in llm.stream(["a"] * 20, SamplingParams(max_tokens=4, ignore_eos=True)):
        most = max(most, llm.engine.stats().num_waiting)
        assert delta.tokens
    assert most == 3


def test_what_is_asked_comes_back(llm: LLM) -> None:
    asked = SamplingParams(
        n=3, seed=1, max_tokens=5, logprobs=2, prompt_logprobs=1, ignore_eos=True
    )
    (output,) = llm.generate([1, 2, 3], asked, use_tqdm=False)
    assert output.prompt is None and output.prompt_token_ids == [1, 2, 3] and output.finished
    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert all(len(each.token_ids) == len(each.logprobs) == 5 for each in output.outputs)
    assert output.prompt_logprobs is not None and [each.id for each in output.prompt_logprobs] == [
        2,
        3,
    ]
    assert len({tuple(each.token_ids) for each in output.outputs}) > 1
    assert llm.generate([[1, 2, 3], [4]], asked, use_tqdm=False)[0].outputs == output.outputs
    long = list(range(40))
    assert [
        llm.generate([long], GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)
    ] == [0, 32]
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    assert llm.generate("no parameters", use_tqdm=False)[0].finished


@pytest.mark.parametrize("progress", [True, False])
def test_progress_can_be_off(llm: LLM, progress: bool, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY, use_tqdm=progress)
    shown = capfd.readouterr()
    assert ("2/2" in shown.err) == progress and not shown.out


def test_structures_are_followed(llm: LLM) -> None:
    """All prompts have one, so that there is nothing else to do while they are compiled; and more
    than may wait."""
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    forms = [("regex", "[ab]{3,5}"), ("json_schema", json.dumps(schema))] * 4
    params = [
        SamplingParams(max_tokens=60, seed=number, structure=form)
        for number, form in enumerate(forms)
    ]
    outputs = llm.generate(["x"] * 8, params, use_tqdm=False)
    assert all(output.finished for output in outputs)
    assert all(
        set(output.outputs[0].text) <= {"a", "b"} and output.outputs[0].text
        for output in outputs[::2]
    )
    assert all(
        isinstance(json.loads(output.outputs[0].text)["ok"], bool) for output in outputs[1::2]
    )
    with pytest.raises(ValueError, match="the regex cannot be used"):
        llm.generate(
            ["a", "b"], [GREEDY, SamplingParams(structure=("regex", "(("))], use_tqdm=False
        )


def test_who_stops_early_leaves_nothing(llm: LLM) -> None:
    for output, _ in llm.stream(
        ["a", "b", "c", "d", "e"], SamplingParams(max_tokens=100, ignore_eos=True)
    ):
        if len(output.outputs[0].token_ids) == 3:
            break
    assert_empty(llm.engine)
    stream = llm.stream("a", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    with pytest.raises(ValueError, match="another stream of this LLM is running"):
        llm.generate("b", GREEDY, use_tqdm=False)
    assert sum(len(delta.tokens) for _, delta in stream) == 99
    assert llm.generate("b", GREEDY, use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("prompts", "params", "said"),
    [
        (["a", "b"], [GREEDY], "1 parameters for 2 prompts; give one for each, or one for all"),
        ("", GREEDY, "at least one token"),
        (["a", [300]], GREEDY, "token ids from 0"),
        (["a", [1] * 250], GREEDY, "max_tokens=6 works"),
        ("a", SamplingParams(n=7), "only 6 sequences"),
        ("a", SamplingParams(logit_bias={264: 1.0}), "logit_bias must .* has 264"),
    ],
)
def test_mistakes_are_sentences_before_anything_is_run(
    llm: LLM, prompts: Any, params: Any, said: str
) -> None:
    steps = llm.engine.num_steps
    with pytest.raises(ValueError, match=said):
        llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.num_steps == steps


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_bytes": 20_000}, r"--kv-bytes \d+ or --max-len 32 fits"),
        ({"kv_bytes": 10}, r"1e-08 GB for it; --kv-bytes \d+ fits"),
        ({"kv_bytes": 10**16}, r"each rank has [0-9.,e+]+ GB left; --kv-bytes [0-9]+ fits"),
        ({"max_len": 257}, "context length is 256"),
        ({"dtype": "fp8"}, "bf16 or fp32"),
        ({"layout": Layout(tp=2)}, "one device"),
        ({"tensor_parallel_size": 2}, "one device"),
        ({"dtype": "float16"}, "dtype float16 is not supported; auto, bfloat16 and float32 are"),
        ({"max_model_length": 9}, "no argument 'max_model_length'; did you mean max_model_len?"),
        ({"swap_space": 4}, "LLM has no argument 'swap_space'; "),
        ({"max_len": 9, "max_model_len": 9}, "max_model_len and max_len are one setting"),
        ({"gpu_memory_utilization": 1.5}, "memory_share is 1.5, but must be above 0"),
    ],
)
def test_what_cannot_be_loaded_is_a_sentence(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        LLM(str(folder), **{"dtype": "fp32"} | changes)


def test_keywords_of_vllm(folder: Path) -> None:
    """Every name of the table is a field, and prompts come in vLLM's forms."""
    llm = LLM(
        str(folder),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=3,
        max_num_batched_tokens=32,
        block_size=16,
        quantization=None,
        kv_cache_dtype="auto",
        tensor_parallel_size=1,
        gpu_memory_utilization=0.001,
        seed=5,
    )
    settings = llm.settings
    assert (settings.dtype, settings.max_len, settings.max_running) == ("fp32", 64, 3)
    assert (settings.max_batch_tokens, settings.page_tokens) == (32, 16)
    assert set(VLLM_NAMES.values()) <= {field.name for field in fields(EngineSettings)}
    drawn = SamplingParams(max_tokens=8, ignore_eos=True)
    ids = list(b"Hello")
    found = [
        llm.generate(*args, **given, sampling_params=drawn, use_tqdm=False)
        for args, given in (
            (({"prompt": "Hello"},), {}),
            (([{"prompt_token_ids": ids}],), {}),
            ((), {"prompt_token_ids": [ids]}),
            ((), {"prompt_token_ids": ids}),
        )
    ]
    assert all(output.prompt_token_ids == ids for (output,) in found)
    again = LLM(str(folder), dtype="fp32", kv_bytes=1 << 18, max_len=64, seed=5)
    (repeated,) = again.generate("Hello", drawn, use_tqdm=False)
    assert repeated.outputs[0].token_ids == found[0][0].outputs[0].token_ids
    for given, said in (
        ({}, "give prompts or prompt_token_ids"),
        ({"prompts": "a", "prompt_token_ids": [1]}, "one of them"),
        ({"prompts": {"prompt": "a", "multi_modal_data": 1}}, "a prompt has the key"),
    ):
        with pytest.raises(ValueError, match=said):
            llm.generate(**given)


def test_a_model_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        LLM(str(tmp_path / "none.gguf"))


def test_importing_the_package_imports_no_torch() -> None:
    told = (
        "import sys, shardwise; from shardwise import SamplingParams; SamplingParams(); "
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
