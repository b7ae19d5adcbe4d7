"""`shardwise bench serve`: what is asked and when, what is made of the times, and servers that
answer or do not. The figures themselves belong to the machine, and are not tested."""

import asyncio
import json
import socket
import statistics
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import serve as bench_serve
import serve_http
import serve_large
import serve_rows
from hypothesis import given
from hypothesis import strategies as st
from profile_decode import Clock, profile_decode, timed_step

from shardwise.cli import main
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.measure import offline as speed
from shardwise.measure.http_client import HttpBackend, first_model, stream_events
from shardwise.measure.load_test import (
    RequestFailed,
    RequestOutcome,
    load_rows,
    measure_load,
    run_load,
)
from shardwise.measure.rows import Row
from shardwise.measure.workload import (
    COMMON_IDS,
    SHAREGPT,
    LatencyLimits,
    Load,
    LoadRequest,
    RequestSizes,
    draw_requests,
)
from shardwise.serve.llm import LLM
from smollm2 import smollm2_gguf
from tiny_models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama-tied", vocab_size=264, max_position_embeddings=128).save_pretrained(folder)
    replace(byte_tokenizer(), eos_ids=frozenset()).save(folder)
    return folder


# -- what is asked


@given(
    load=st.one_of(
        st.builds(Load, concurrency=st.integers(1, 9)),
        st.builds(Load, rates=st.tuples(*[st.floats(0.1, 90)] * 2)),
    ),
    sizes=st.builds(
        RequestSizes, st.integers(1, 60), st.integers(1, 9), st.just("fixed"), st.floats(0, 1)
    ),
    num_requests=st.integers(1, 20),
    seed=st.integers(0, 9),
)
def test_requests_are_as_said_and_follow_from_the_seed(
    load: Load, sizes: RequestSizes, num_requests: int, seed: int
) -> None:
    drawn = draw_requests(load, sizes, num_requests, seed)
    assert drawn == draw_requests(load, sizes, num_requests, seed)
    assert {len(each.tokens) for each in drawn} == {sizes.prompt_tokens}
    assert all(
        each.max_tokens == sizes.max_tokens and set(each.tokens) <= set(COMMON_IDS)
        for each in drawn
    )
    assert (
        len({each.tokens[: int(sizes.shared_prefix * sizes.prompt_tokens)] for each in drawn}) == 1
    )
    times = [each.arrival_s for each in drawn]
    assert times[0] == 0 and times == sorted(times) and (load.rates is not None or times[-1] == 0)


def test_other_seeds_and_loads_ask_for_other_tokens() -> None:
    loads = (Load(concurrency=1), Load(concurrency=2), Load(rates=(1, 1)), Load(rates=(1, 2)))
    prompts = [
        draw_requests(load, RequestSizes(), 1, seed)[0].tokens for load in loads for seed in (0, 1)
    ]
    assert len(set(prompts)) == 8
    assert max(draw_requests(loads[0], RequestSizes(), 9, 0, vocab_size=50)[0].tokens) < 50


def test_requests_come_as_a_poisson_process_at_its_rate() -> None:
    """Gaps have the mean 1 / rate and, being exponential, a standard deviation equal to it: within
    8 %."""
    times = [
        each.arrival_s for each in draw_requests(Load(rates=(5, 5)), RequestSizes(1, 1), 4000, 0)
    ]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.08)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.08)
    ramp = [
        each.arrival_s for each in draw_requests(Load(rates=(2, 20)), RequestSizes(1, 1), 4000, 0)
    ]
    assert (
        ramp[400] / 400 == pytest.approx(1 / 2.9, rel=0.15)
        and (ramp[-1] - ramp[-401]) / 400 < 1 / 18
    )


def test_lengths_of_sharegpt_have_its_means() -> None:
    """Within 8 % for 4,000 draws; cut where a model takes no more."""
    drawn = draw_requests(Load(concurrency=1), RequestSizes(lengths="sharegpt"), 4000, 0)
    for (mean, _), sizes in zip(
        SHAREGPT, zip(*((len(e.tokens), e.max_tokens) for e in drawn), strict=True), strict=True
    ):
        assert statistics.mean(sizes) == pytest.approx(mean, rel=0.08)
    short = draw_requests(
        Load(concurrency=1), RequestSizes(lengths="sharegpt"), 300, 0, max_len=128
    )
    assert max(len(each.tokens) for each in short) == max(each.max_tokens for each in short) == 64


# -- what is made of it


def outcome(start_s: float, tokens_s: list[float], error: str | None = None) -> RequestOutcome:
    request = LoadRequest(start_s, (1, 2, 3), len(tokens_s))
    end_s = tokens_s[-1] if tokens_s else start_s
    return RequestOutcome(request, start_s, tokens_s, end_s, len(tokens_s), error)


def test_figures_are_those_of_the_times() -> None:
    outcomes = [outcome(0, [1, 2, 4]), outcome(1, [1.5, 2.0, 2.5, 3.0]), outcome(2, [], "no")]
    values = {row.name: row.value for row in load_rows(outcomes, LatencyLimits(1000, 1000), "x")}
    assert values["requests_per_s"] == 2 / 4 and values["output_tokens_per_s"] == 7 / 4
    assert values["prompt_tokens_per_s"] == 6 / 4 and values["errors"] == 1
    assert values["ttft_p50_s"] == 0.75 and values["ttft_p90_s"] == pytest.approx(0.95)
    assert values["itl_p50_s"] == 0.5 and values["itl_p99_s"] == pytest.approx(1.96)
    assert values["e2e_p50_s"] == 3.0
    assert values["goodput_requests_per_s"] == 1 / 4 and values["good_share"] == pytest.approx(
        1 / 3
    )
    assert outcomes[0].meets(LatencyLimits(1000, 1500))
    assert not outcomes[0].meets(LatencyLimits(900, 1500))
    assert "good_share" not in {row.name for row in load_rows(outcomes, LatencyLimits(), "x")}


class Recording:
    """Takes a turn of the event loop for each token, and writes down who is there together and how
    long they waited."""

    vocab_size: int | None = 100
    max_len: int | None = 64

    def __init__(self) -> None:
        self.there = self.most = 0

    async def complete(self, prompt: Any, max_tokens: int, on_tokens: Callable[[], None]) -> int:
        self.there += 1
        self.most = max(self.most, self.there)
        for _ in range(max_tokens):
            await asyncio.sleep(0)
            on_tokens()
        self.there -= 1
        if prompt[0] % 2:
            raise RequestFailed("odd")
        return max_tokens


@pytest.mark.parametrize(("concurrency", "num_requests"), [(1, 4), (3, 10), (8, 4)])
def test_a_closed_loop_keeps_its_clients_busy_and_no_more(
    concurrency: int, num_requests: int
) -> None:
    target = Recording()
    done = []
    load = Load(concurrency=concurrency)
    drawn = draw_requests(load, RequestSizes(4, 5), num_requests, 0, 100)
    outcomes = asyncio.run(run_load(target, load, drawn, lambda: done.append(1)))
    assert target.most == min(concurrency, num_requests) and len(done) == num_requests
    for each, asked in zip(outcomes, drawn, strict=True):
        assert each.request == asked and len(each.tokens_s) == 5
        assert each.error == ("odd" if asked.tokens[0] % 2 else None)


def test_an_open_loop_waits_for_nobody_and_counts_from_when_a_request_was_due() -> None:
    load = Load(rates=(2000, 2000))
    drawn = draw_requests(load, RequestSizes(4, 3), 30, 0, 100)
    outcomes = asyncio.run(run_load(Recording(), load, drawn, lambda: None))
    assert [each.start_s for each in outcomes] == [each.arrival_s for each in drawn]
    assert all(each.tokens_s[0] >= each.start_s for each in outcomes)


def test_a_ramp_is_told_in_parts() -> None:
    rows, problems = asyncio.run(
        measure_load(
            Recording(),
            Load(rates=(1000, 4000)),
            RequestSizes(4, 3),
            20,
            0,
            LatencyLimits(),
            lambda: None,
        )
    )
    loads = list(dict.fromkeys(row.case for row in rows))
    assert (
        len(loads) == 5 and loads[0] == "ramp 1000:4000" and loads[1].endswith("1e+03 to 1.63e+03")
    )
    assert sum(row.value for row in rows if row.name == "errors" and row.case != loads[0]) == next(
        row.value for row in rows if row.name == "errors"
    )
    assert problems == ["odd"]


# -- servers


def event(**content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


STREAM = b"".join(
    [
        event(choices=[{"text": "a"}]),
        b": a comment\n\n",
        event(choices=[{"text": "é"}]),
        event(choices=[]),
        event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 7}),
        b"data: [DONE]\n\n",
    ]
)
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x;x=1\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def against(answer: bytes, ask: Callable[[str], Coroutine[Any, Any, Any]]) -> tuple[Any, bytes]:
    """What comes of asking a server that gives this answer to anything, and what it was sent."""

    async def run() -> tuple[Any, bytes]:
        sent = b""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.startswith(b"Content-Length")
            )
            sent = head + await reader.readexactly(length)
            writer.write(answer)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            return await ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"), sent

    return asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [
        *(
            OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(STREAM, size)
            for size in (1, 7, 1000)
        ),
        OK + b"\r\n" + STREAM,
        OK + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM + b"more",
    ],
)
def test_a_stream_is_read_however_it_is_cut(answer: bytes) -> None:
    heard: list[int] = []
    got, sent = against(
        answer,
        lambda url: HttpBackend(url, "m", "secret").complete([1, 2, 3], 7, lambda: heard.append(1)),
    )
    assert (got, len(heard)) == (7, 2)
    head, body = sent.split(b"\r\n\r\n")
    assert (
        head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
        and b"Authorization: Bearer secret" in head
    )
    asked = json.loads(body)
    assert (
        asked["prompt"] == [1, 2, 3]
        and asked["stream"]
        and asked["max_tokens"] == 7
        and asked["ignore_eos"]
    )


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            b'HTTP/1.1 401 No\r\nContent-Length: 31\r\n\r\n{"error": {"message": "no key"}}'[:-1],
            "401: ",
        ),
        (
            b'HTTP/1.1 429 Full\r\n\r\n{"error": {"message": "try again in 3 s"}}',
            "429: try again in 3 s",
        ),
        (b"HTTP/1.1 500 Oh\r\n\r\n<html>", "500: b'<html>'"),
        (
            OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(STREAM, 50)[:120],
            "the connection broke",
        ),
        (b"220 mail.example ESMTP\r\n\r\n", "not HTTP"),
        (b"", "not HTTP"),
        (OK + b"\r\n" + event(error={"message": "it failed"}), "it failed"),
        (OK + b"\r\ndata: {oh\n\n", "an event is not JSON"),
    ],
)
def test_what_goes_wrong_is_said(answer: bytes, sentence: str) -> None:
    async def ask(url: str) -> str:
        with pytest.raises(RequestFailed) as caught:
            await HttpBackend(url, "m", None).complete([1], 1, lambda: None)
        return str(caught.value)

    told, sent = against(answer, ask)
    assert sentence in told and b"Authorization" not in sent


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as bound:  # so that nobody else has the port; it does not listen
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        with pytest.raises(ValueError, match=r"cannot be listed: cannot connect to"):
            asyncio.run(first_model(url, None))


def test_the_first_model_of_a_server_is_taken() -> None:
    body = json.dumps({"object": "list", "data": [{"id": "a"}, {"id": "b"}]}).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    assert against(answer, lambda url: first_model(url, None))[0] == "a"


def test_who_leaves_a_stream_early_closes_its_connection() -> None:
    async def ask(url: str) -> dict[str, Any]:
        stream = stream_events(url + "/completions", None, {})
        first = await anext(stream)
        await stream.aclose()
        return first

    assert against(OK + b"\r\n" + STREAM, ask)[0] == {"choices": [{"text": "a"}]}


# -- a model of ours


def test_a_model_is_measured(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loads = (
        "--concurrency",
        "2",
        "--rate",
        "50",
        "--requests",
        "5",
        "--prompt-tokens",
        "20",
        "--max-tokens",
        "6",
    )
    assert main(["bench", "serve", str(model), *loads, "--ttft-ms", "60000", "--json"]) == 0
    told = capsys.readouterr()
    answer = json.loads(told.out)
    rows = [Row(row["name"], row["value"], row["unit"], row["load"]) for row in answer["rows"]]
    values = {(row.case, row.name): row.value for row in rows}
    for load in ("concurrency 2", "rate 50"):
        assert values[load, "errors"] == 0 and values[load, "good_share"] == 1
        assert values[load, "output_tokens_per_s"] == pytest.approx(
            6 * values[load, "requests_per_s"]
        )
        assert values[load, "prompt_tokens_per_s"] == pytest.approx(
            20 * values[load, "requests_per_s"]
        )
        assert 0 < values[load, "ttft_p50_s"] <= values[load, "e2e_p99_s"]
    ratio = values["rate 50", "itl_p50_s"] / values["concurrency 2", "itl_p50_s"]
    assert answer["ratios"]["itl_p50_s rate 50/concurrency 2"] == pytest.approx(ratio)
    assert "concurrency 2, 1 of 2" in told.err


def test_requests_that_fail_are_told(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Too long for the model: refused one by one."""
    assert (
        main(
            [
                "bench",
                "serve",
                str(model),
                "--requests",
                "2",
                "--prompt-tokens",
                "127",
                "--max-tokens",
                "9",
            ]
        )
        == 1
    )
    told = capsys.readouterr()
    assert "exceed the 128 tokens that a request may have" in told.err and "errors" in told.out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["serve"], "name a MODEL to load"),
        (["serve", "m", "--ramp", "4"], "--ramp must be A:B"),
        (["serve", "m", "--rate", "0"], "must be positive"),
        (
            ["serve", "m", "--concurrency", "2", "--concurrency", "2"],
            "the load concurrency 2 is named twice",
        ),
        (
            ["serve", "m", "--length", "3"],
            "--length is a flag of `bench train`, not of `bench serve`",
        ),
        (
            ["train", "--max-tokens", "3"],
            "--max-tokens is a flag of `bench serve`, not of `bench train`",
        ),
        (["serve", "m", "--requests", "0"], "--requests must be at least 1"),
        (["serve", "m", "--shared-prefix", "2"], "--shared-prefix must be from 0 to 1, not 2"),
        (
            ["serve", "m", "--url", "http://localhost:1/v1", "--quant", "int8"],
            "--quant configures a local MODEL and cannot be combined with --url",
        ),
        (["train", "--quant", "int8"], "--quant is a flag of `bench serve`, not of `bench train`"),
    ],
)
def test_what_cannot_be_is_refused(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *argv]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--quant", "int4-g128"],
            "groups of 128 columns do not divide the 64 columns of blocks.0.qkv; groups of 32 do",
        ),
        (["--quant", "as-stored"], "is not quantized, so as-stored does not apply"),
        (["--quant", "int5"], "unknown quantization scheme 'int5'"),
        (["--layout", "tp3"], "layout tp3: "),
    ],
)
def test_engines_that_cannot_be_are_refused(
    model: Path, flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", str(model), *flags]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\nshardwise: ") <= 1 and "Traceback" not in said


def test_where_the_time_of_a_step_goes(model: Path) -> None:
    """Parts are there and add up to a step; the engine goes on as it was."""
    llm = LLM(str(model), dtype="fp32", kv_bytes=1 << 20)
    found = profile_decode(llm, 3, 20, 2)
    named = {
        "scheduler",
        "products",
        "attention",
        "head",
        "norms",
        "activation",
        "sampler",
        "completions",
        "link",
    }
    assert named < found.parts.keys() and min(found.parts.values()) > 0
    assert (
        0 < found.overhead_s < found.step_s
        and 0 < found.run_s < found.step_s
        and found.weights_s > 0
    )
    assert timed_step(llm.engine, Clock(), 3).keys() >= {
        "scheduler",
        "sampler",
        "completions",
        "link",
    }
    assert "sample" not in vars(llm.engine)


# -- bench/serve.py


def test_the_best_of_each_counts() -> None:
    runs = {
        "1 sequence": {"Shardwise": [30.0, 33.0], "transformers": [22.0, 20.0]},
        "32 sequences": {"Shardwise": [200.0, 240.0], "transformers": [100.0, 60.0]},
    }
    report = bench_serve.Report({"cores": 2}, runs)
    told = report.to_json()
    assert (
        told["ratios"] == {"1 sequence": 1.5, "32 sequences": 2.4}
        and told["bars"]["32 sequences"] == 2.5
    )
    assert {row["value"] for row in told["rows"]} == {33.0, 22.0, 240.0, 100.0}
    assert bench_serve.markdown(report.lines(), report.about).splitlines()[2:4] == [
        "| 1 | 33.0 | 22.0 | 1.50 | ≥ 1.5 | met |",
        "| 32 | 240.0 | 100.0 | 2.40 | ≥ 2.5 | missed |",
    ]


def test_transformers_runs_the_same_work(model: Path) -> None:
    """In this environment, with the tiny model: as many tokens as asked for, with both caches."""
    told = bench_serve.run(
        [
            sys.executable,
            str(Path(bench_serve.HERE) / "serve_peers.py"),
            str(model),
            "2",
            "8",
            "4",
            "1",
        ]
    )
    assert told["output_tokens_per_s"] == max(told["dynamic"], told["static"]) > 0


# -- how fast a model is with nothing in between


def test_speed_has_the_rows_that_engines_are_compared_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real command on a tiny model, smaller work."""
    tiny_model("llama-tied", vocab_size=264, max_position_embeddings=512).save_pretrained(tmp_path)
    replace(byte_tokenizer(), eos_ids=frozenset()).save(tmp_path)
    monkeypatch.setattr(speed, "STEPS", 3)
    monkeypatch.setattr(speed, "TRIES", 1)
    assert main(["bench", "serve", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    named = [
        "prefill_512",
        *(f"{what}_{size}" for what in ("decode", "generate") for size in (1, 8, 32)),
    ]
    assert [row["name"] for row in rows] == named
    assert all(row["value"] > 0 and row["unit"] == "tokens/s" for row in rows)


def test_speed_is_that_of_one_device_and_of_long_enough_sequences(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", str(model), "--layout", "tp2"]) == 2
    assert "--concurrency measures a load on several" in capsys.readouterr().err
    assert main(["bench", "serve", str(model)]) == 2
    assert "--concurrency measures another load" in capsys.readouterr().err


def limits(rate: float = 800e9) -> serve_rows.Limits:
    return serve_rows.Limits(
        30e9, rate, weight_bytes=100_000_000, block_operations=10**8, head_operations=10**8
    )


def test_what_the_machine_allows() -> None:
    """Memory bounds one sequence, operations many; a whole request is a prompt and then steps."""
    assert limits().tokens_per_s("decode_1") == pytest.approx(300)
    assert limits().tokens_per_s("decode_32") == pytest.approx(4000)
    assert limits().tokens_per_s("prefill_512") == pytest.approx(512 / (513e8 / 800e9))
    assert limits().tokens_per_s("generate_1") == pytest.approx(128 / (129e8 / 800e9 + 127 / 300))


def test_rows_are_held_against_the_best_of_others_and_the_machine() -> None:
    report = serve_rows.Report({"cores": 2}, limits())
    for row in serve_rows.BARS:
        report.runs[row] = {
            "Shardwise": [100.0, 120.0],
            "llama.cpp Q4_0": [90.0, 100.0],
            "OpenVINO Q8_0": [50.0],
        }
    told = report.to_json()
    assert told["ratios"] == dict.fromkeys(serve_rows.BARS, 1.2) and told["bars"] == serve_rows.BARS
    assert (
        bench_serve.markdown(report.lines(), report.about).count("| llama.cpp Q4_0 | 1.20 |") == 7
        and bench_serve.markdown(report.lines(), report.about).count("| met |") == 1
    )
    assert report.to_svg().count("<rect") >= 21


def test_a_large_model_is_told_by_kind() -> None:
    report = serve_large.Report({"cores": 2}, {"bf16": limits(400e9), "4 bits": limits()})
    for kind, ours in (("bf16", 20.0), ("4 bits", 60.0)):
        report.runs[kind] = {
            row: {"Shardwise": [ours, 10.0], "llama.cpp": [15.0]} for row in serve_large.ROWS
        }
    told = report.to_json()
    assert told["ratios"]["decode_8, 4 bits"] == 4.0 and told["ratios"][
        "decode_8, bf16"
    ] == pytest.approx(4 / 3)
    assert [line[:2] for line in report.lines()][1:3] == [
        ("bf16", "prefill_512"),
        ("bf16", "decode_1"),
    ]


def test_http_is_held_against_the_same_load_without_it() -> None:
    report = serve_http.Report(
        {"cores": 2}, {"in process": [90.0, 100.0], "over HTTP": [92.0, 80.0]}
    )
    assert report.ratio == 0.92 and [line[-1] for line in report.lines()] == ["", "met"]
    report.runs["over HTTP"] = [89.0]
    assert (
        report.to_json()["ratios"] == {"over HTTP": 0.89}
        and [line[-1] for line in report.lines()][1] == "missed"
    )


def test_the_machine_is_measured_for_the_model_at_hand() -> None:
    limits = serve_rows.measure_limits(smollm2_gguf())
    assert limits.block_operations == 2 * 106_168_320 and limits.head_operations == 2 * 49152 * 576
    assert limits.weight_bytes == 106_168_320 * 20 // 32 + 49152 * 576 * 34 // 32
    assert limits.read_bytes_per_s > 0 and limits.operations_per_s > 0
