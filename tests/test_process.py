"""The engine in its own process: it starts, refuses, dies, is started again and ends, and nothing
of it is left."""

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import AsDriver, answers, drawn_tokens, engine_of, greedy, plain_logprobs, runner_of
from processes import children, ranks_of
from shardwise.formats.model_source import read_config
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.kernels.description import describe_kernels
from shardwise.kernels.registry import serving_kernels
from shardwise.layout import Layout
from shardwise.measure.reference_model import load_reference_model
from shardwise.parallel.launch import Place
from shardwise.parallel.memory import container_bytes
from shardwise.plan.ledger import serving_ledgers
from shardwise.precision import Precision
from shardwise.serve.engine import remote as process
from shardwise.serve.engine import worker
from shardwise.serve.engine.remote import RemoteEngine
from shardwise.serve.engine.runner import LOGPROB_ROWS
from shardwise.serve.engine.scheduler import Limits, QueueFull
from shardwise.serve.engine.sequence import Batch
from shardwise.serve.engine_client import EngineDied
from shardwise.serve.request import MAX_LOGPROBS, Request, SamplingParams
from shardwise.serve.settings import EngineSettings
from smollm2 import smollm2_gguf
from tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("default_signals")

PATIENCE_S = 120.0  # only a test that fails waits that long
NOTICED_S = 10.0  # a second on a machine that is free
LONG = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
PROMPT = (72, 101, 108)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", vocab_size=264, max_position_embeddings=4096).save_pretrained(path)
    byte_tokenizer().save(path)
    return path


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sockets are, so that one that is left can be seen."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def others() -> list[int]:
    """Processes of other tests, which stay for the whole session."""
    return children(os.getpid())


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


def remote(
    path: Path,
    said: list[str] | None = None,
    pauses_s: Sequence[float] = process.PAUSES_S,
    **settings: Any,
) -> RemoteEngine:
    chosen: dict[str, Any] = {"dtype": "fp32", "kv_bytes": 1 << 23} | settings
    return RemoteEngine(
        EngineSettings(path, **chosen),
        read_config(path),
        load_tokenizer(path),
        ([] if said is None else said).append,
        pauses_s,
    )


async def tokens_of(
    engine: RemoteEngine, params: SamplingParams = SHORT, prompt: tuple[int, ...] = PROMPT
) -> list[int]:
    return [
        token async for delta in engine.generate(Request(prompt, params)) for token in delta.tokens
    ]


def pid_of(engine: RemoteEngine) -> int:
    assert engine.process is not None and engine.process.process.pid is not None
    return engine.process.process.pid


def interrupt(*pids: int) -> None:
    """As a terminal and `kill` do it to a whole group."""
    for pid in pids:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)


def assert_gone(pid: int) -> None:
    """The process has ended, and so has each that it had started."""
    until = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until
    assert pid not in children(os.getpid())


def test_smollm2_starts_answers_and_ends(own_temporary_folder: Path) -> None:
    async def check() -> None:
        said: list[str] = []
        before = set(os.listdir("/proc/self/fd"))
        engine = remote(smollm2_gguf(), said, dtype="bf16", kv_bytes=1 << 28, max_queued=2)
        assert not engine.is_ready
        await engine.start()
        assert engine.is_ready and engine.max_len == 8192
        phases = [line.split(":")[0] for line in said[:3]]
        assert phases == ["weights", "memory of a full batch", "KV cache"]
        assert all(re.fullmatch(r".*: \d+\.\d\d s", line) for line in said[:3])
        kernels = describe_kernels(
            serving_kernels(torch.device("cpu"), torch.bfloat16).name, "cpu", "bf16"
        )
        assert said[3:] == [
            f"Q4_1 and Q8_0 weights kept as stored, {kernels}, room for 1 request of 8,192 tokens"
        ]
        prompt = tuple(engine.tokenizer.encode("The capital of France is"))
        texts = [delta.text async for delta in engine.generate(Request(prompt, SHORT))]
        assert "Paris" in "".join(texts)
        assert sum(x * x for x in await engine.embed(prompt)) == pytest.approx(1)
        for request, what in (
            (Request((), SHORT), "token"),
            (Request((10**6,), SHORT), "token ids from 0 to"),
        ):
            with pytest.raises(ValueError, match=what):
                [delta async for delta in engine.generate(request)]
        with pytest.raises(ValueError, match="token ids from 0 to"):
            await engine.embed([10**6])
        deltas = engine.generate(Request(prompt, LONG))
        await anext(deltas)
        assert (await engine.stats()).num_running == 1
        await deltas.aclose()
        stats = await engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_used) == (0, 0, 0)
        assert stats.prompt_tokens == 2 * len(prompt) and stats.generated_tokens >= 13
        waiting = asyncio.create_task(tokens_of(engine, LONG))
        await asyncio.sleep(0)
        pid = pid_of(engine)
        await engine.close()
        with pytest.raises(EngineDied, match="shutting down"):
            await waiting
        with pytest.raises(EngineDied, match="shutting down"):
            await tokens_of(engine)
        assert_gone(pid)
        assert not engine.waiting and not list(own_temporary_folder.iterdir())
        assert (
            len(set(os.listdir("/proc/self/fd")) - before) <= 3
        )  # the tracker's, and listdir's own

    run(check())


def test_what_does_not_fit_is_refused_with_what_does(
    folder: Path, own_temporary_folder: Path, others: list[int]
) -> None:
    async def check() -> None:
        with pytest.raises(ValueError) as refused:
            await remote(folder, kv_bytes=100_000).start()
        told = re.fullmatch(
            r"a request of 4096 tokens needs ([\d.e-]+) GB of KV cache on each rank, which has "
            r"([\d.e-]+) GB for it; "
            r"--kv-bytes 2097152 or --max-len (\d+) fits",
            str(refused.value),
        )
        assert told and float(told[1]) == pytest.approx(256 * 8192 / 1e9 * 1, rel=0.01)
        assert float(told[2]) == pytest.approx(1e-4)
        assert set(children(os.getpid())) <= set(others)
        assert not list(own_temporary_folder.iterdir())
        engine = remote(folder, kv_bytes=100_000, max_len=int(told[3]))
        await engine.start()
        assert engine.max_len == int(told[3])
        assert (
            len(await tokens_of(engine, SamplingParams(max_tokens=None, ignore_eos=True)))
            == int(told[3]) - 3
        )
        await engine.close()

    run(check())


def test_one_that_dies_is_told_of_and_started_again(
    folder: Path, own_temporary_folder: Path, others: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        said: list[str] = []
        engine = remote(folder, said, max_running=2, max_batch_tokens=64, max_queued=4)
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        pid = pid_of(engine)
        interrupt(pid)
        await starting
        expected = await tokens_of(engine)
        interrupt(pid)
        assert await tokens_of(engine) == expected
        waiting = [asyncio.create_task(tokens_of(engine, LONG)) for _ in range(4)]
        while (await engine.stats()).num_running < 2:
            pass
        waiting += [asyncio.create_task(tokens_of(engine, LONG)) for _ in range(2)]
        while (await engine.stats()).num_waiting < 4:
            pass
        with pytest.raises(QueueFull, match="try again in") as full:
            await tokens_of(engine)
        assert full.value.retry_after_s >= 1
        monkeypatch.setattr(process, "QUICK_S", 0.0)
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        for task in waiting:
            with pytest.raises(EngineDied, match="its process ended with code -9"):
                await task
        assert time.monotonic() - began < 2
        with pytest.raises(EngineDied, match="started again"):
            await tokens_of(engine)
        await asyncio.sleep(0)
        assert not engine.is_ready and said[-1] == "it is started again"
        await engine.restart
        assert engine.is_ready and pid_of(engine) != pid
        assert_gone(pid)
        assert await tokens_of(engine) == expected
        await engine.close()
        assert set(children(os.getpid())) <= set(others)
        assert not list(own_temporary_folder.iterdir())

    run(check())


def test_one_that_ends_early_is_started_again_after_growing_pauses(folder: Path) -> None:
    """Failed starts count too, an engine that lasts starts the count again, and one that keeps
    ending early is lost in the end."""

    async def check() -> None:
        said: list[str] = []
        engine = remote(folder, said, pauses_s=(0.0, 0.01, 0.02))
        await engine.start()
        os.kill(pid_of(engine), signal.SIGKILL)
        with pytest.raises(EngineDied, match="code -9"):
            await tokens_of(engine, LONG)
        await asyncio.sleep(0)
        assert not engine.is_running and said[-1] == "it is started again in 0.01 s"
        await engine.restart
        assert engine.is_running and await tokens_of(engine)
        engine.settings = replace(engine.settings, model=folder / "gone")
        os.kill(pid_of(engine), signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            await engine.lost.wait()
        assert said[-3] == "it is started again in 0.02 s" and "not be started" in said[-2]
        assert said[-1] == "it ended early 3 times in a row, and is not started again"
        with pytest.raises(EngineDied, match="for good"):
            await tokens_of(engine)
        await engine.close()

    run(check())


def test_the_event_loop_does_not_wait_for_a_step(folder: Path) -> None:
    """Requests that fill the socket while the engine is away, as it is within a long step."""

    async def check() -> None:
        engine = remote(folder, max_queued=8)
        await engine.start()
        pid = pid_of(engine)
        rescue = threading.Timer(PATIENCE_S / 4, os.kill, (pid, signal.SIGKILL))
        rescue.start()
        os.kill(pid, signal.SIGSTOP)
        requests = [asyncio.create_task(tokens_of(engine, SHORT, (1,) * 4000)) for _ in range(200)]
        await asyncio.sleep(0)
        assert (
            len(engine.waiting) == 200 and Path(f"/proc/{pid}/stat").read_text().split()[2] == "T"
        )
        for task in requests:
            task.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        os.kill(pid, signal.SIGCONT)
        while (await engine.stats()).pages_used:
            pass
        rescue.cancel()
        await engine.close()

    run(check())


def test_one_that_is_closed_while_it_starts_is_gone(
    folder: Path, own_temporary_folder: Path
) -> None:
    async def check() -> None:
        engine = remote(folder)
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        pid = pid_of(engine)
        await engine.close()
        with pytest.raises(EngineDied):
            await starting
        assert_gone(pid)
        assert not list(own_temporary_folder.iterdir())

    run(check())


SERVER = """
import asyncio, os, signal, sys
from pathlib import Path
from shardwise.formats.huggingface.hf_config import read_folder_config
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.serve.engine.remote import RemoteEngine
from shardwise.serve.engine.scheduler import Limits, QueueFull
from shardwise.serve.settings import EngineSettings

async def main(path, end):
    settings = EngineSettings(Path(path), kv_bytes=1 << 23)
    engine = RemoteEngine(settings, read_folder_config(Path(path)), byte_tokenizer(), str)
    await engine.start()
    assert "torch" not in sys.modules
    print(engine.process.process.pid, flush=True)
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "fails":
        raise ValueError("of the server")

if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(("end", "code"), [("killed", -9), ("fails", 1)])
def test_it_ends_with_its_server(folder: Path, tmp_path: Path, end: str, code: int) -> None:
    """However that ends, without a word or by an error of its own: Python must not wait for the
    engine at its exit."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    command = [sys.executable, str(script), str(folder), end]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.returncode == code, ran.stderr
    assert ("of the server" in ran.stderr) == (end == "fails")
    assert_gone(int(ran.stdout))


# -- tensor parallel


def test_two_ranks_say_what_one_says(folder: Path) -> None:
    dtype: Precision = "bf16"
    model = load_reference_model(folder, worker.DTYPES[dtype], torch.device("cpu"))
    prompts = [tuple(range(5, 5 + count)) for count in (1, 17, 90)]
    expected = answers(
        engine_of(runner_of(model), model.tokenizer), [Request(prompt, SHORT) for prompt in prompts]
    )

    async def check() -> None:
        engine = remote(
            folder, layout=Layout(tp=2), dtype=dtype, max_batch_tokens=40, max_running=8
        )
        await engine.start()
        pid = pid_of(engine)
        ranks = ranks_of(pid)
        assert len(ranks) == 2
        interrupt(pid, *ranks)
        found = await asyncio.gather(*(tokens_of(engine, SHORT, prompt) for prompt in prompts))
        if dtype == "fp32":
            assert found == [got.tokens for (got,) in expected]
        assert [
            await tokens_of(engine, SHORT, prompt) for prompt in prompts
        ] == found  # alone, cached
        assert sum(x * x for x in await engine.embed(prompts[1])) == pytest.approx(1)
        with pytest.raises(ValueError, match="token ids from 0 to"):
            await tokens_of(engine, SHORT, (264,))
        if dtype == "bf16":
            await engine.close()
        else:
            waiting = asyncio.create_task(tokens_of(engine, LONG))
            while not (await engine.stats()).num_running:
                pass
            os.kill(ranks[1], signal.SIGKILL)
            with pytest.raises(EngineDied, match="rank 1 failed first, with exit code -9"):
                await waiting
            await engine.close()
        assert not any(Path(f"/proc/{each}").exists() for each in (pid, *ranks))

    run(check())


def exhaust(pid: int) -> None:
    """From now on the process gets no more memory."""
    resource.prlimit(pid, resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))


def test_ranks_end_together_and_are_started_again(
    folder: Path, own_temporary_folder: Path, others: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one is killed while all are idle, and if one fails where the other does not."""
    monkeypatch.setattr(process, "QUICK_S", 0.0)

    async def check() -> None:
        said: list[str] = []
        engine = remote(folder, said, layout=Layout(tp=2))
        await engine.start()
        expected = await tokens_of(engine)
        first = pid_of(engine)
        os.kill(ranks_of(first)[1], signal.SIGKILL)
        began = time.monotonic()
        while engine.restart is None:
            await asyncio.sleep(0.01)
        assert time.monotonic() - began < NOTICED_S
        assert any("rank 1 failed first, with exit code -9" in line for line in said), said
        await engine.restart
        assert await tokens_of(engine) == expected
        second = pid_of(engine)
        exhaust(ranks_of(second)[1])
        with pytest.raises(
            EngineDied, match=r"the engine has ended: rank 1 failed first, with exit code -?\d+$"
        ):
            await engine.embed(list(range(200)) * 20)
        await asyncio.sleep(0)
        assert not engine.lost.is_set() and said[-1] == "it is started again"
        await engine.close()
        for pid in (first, second):
            assert_gone(pid)
        assert set(children(os.getpid())) <= set(others)
        assert not list(own_temporary_folder.iterdir())

    run(check())


# -- what the process does with what it hears


@dataclass
class Idle(AsDriver):
    """A runner that is no good at embedding, and remembers that it was told to go on waiting."""

    kept: threading.Event = field(default_factory=threading.Event)

    def embed(self, inputs: Any) -> list[list[float]]:
        raise RuntimeError("no memory")

    def keep_alive(self) -> None:
        self.kept.set()


def test_ranks_are_kept_alive_while_only_questions_come(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions that come more often than IDLE_S do not keep the ranks waiting for a batch until
    they give up."""
    monkeypatch.setattr(worker, "IDLE_S", 1e6)
    model = load_reference_model(folder, torch.float32, torch.device("cpu"))
    runner = runner_of(model)
    runs = Idle(runner)
    ours, its = Pipe()
    talk = threading.Thread(
        target=worker.serve_until_gone, args=(its, engine_of(runner, model.tokenizer, runs=runs))
    )
    talk.start()
    for name in range(3):
        ours.send(("stats", name))
        assert ours.recv()[:2] == ("result", name)
    ours.send(("embed", 3, [1, 2]))
    assert ours.recv() == ("failed", 3, "no memory")
    ours.send(("add", 4, Request(PROMPT, SHORT, request_id=4)))
    what, deltas = ours.recv()
    assert what == "deltas" and deltas[0].request_id == 4
    while ours.poll(0.2) and ours.recv()[1][0].finish_reason is None:
        pass
    runs.kept.clear()
    ours.send(("stats", 5))
    assert ours.recv()[:2] == ("result", 5) and runs.kept.wait(PATIENCE_S)
    ours.close()
    talk.join(PATIENCE_S)
    assert not talk.is_alive()


class Picky(AsDriver):
    """A runner that fails on inputs with token 9, and remembers how many tokens it embedded."""

    sizes: list[list[int]]

    def embed(self, inputs: Any) -> list[list[float]]:
        self.sizes.append([len(tokens) for tokens in inputs])
        if any(9 in tokens for tokens in inputs):
            raise RuntimeError("no nines")
        return super().embed(inputs)


def test_inputs_to_embed_hold_up_nobody_and_can_be_taken_back(folder: Path) -> None:
    """Between two steps as many are embedded as fit into a step of 33 tokens."""
    model = load_reference_model(folder, torch.float32, torch.device("cpu"))
    runs = Picky(runner := runner_of(model))
    runs.sizes = []
    engine = engine_of(runner, model.tokenizer, limits=Limits(33, 32, 1024), runs=runs)
    ours, its = Pipe()
    ours.send(("add", 0, Request(PROMPT, SHORT)))
    for name, size in enumerate([2, 40, 30, 2, 1, 2, 5], 1):
        ours.send(("embed", name, [name] * size))
    ours.send(("embed", 8, [264]))
    ours.send(("abort", 6))
    ours.send(("embed", 9, [9]))
    talk = threading.Thread(target=worker.serve_until_gone, args=(its, engine))
    talk.start()
    assert SHORT.max_tokens is not None
    refused, *heard = (ours.recv() for _ in range(1 + 7 + SHORT.max_tokens))
    assert refused[:2] == ("refused", 8) and "from 0 to 263" in refused[2]
    assert runs.sizes == [[2, 30, 1], [40], [2, 5, 1], [2], [5], [1]]
    names = [message[1] if message[0] != "deltas" else "step" for message in heard]
    assert names[:10] == [1, 3, 5, "step", 2, "step", 4, 7, 9, "step"]
    assert set(names[10:]) == {"step"}
    assert ("failed", 9, "no nines") in heard
    ours.send(("stats", 8))
    assert ours.recv()[:2] == ("result", 8)
    ours.close()
    talk.join(PATIENCE_S)
    assert not talk.is_alive()


# -- memory


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    """What it has read of files can be dropped; without a limit, or outside of a container, there
    is none."""
    nowhere = tmp_path / "none"
    assert container_bytes(tmp_path, nowhere) == 1 << 62
    for name, text in (
        ("current", "700\n"),
        ("stat", "anon 100\ninactive_file 250\nactive_file 50\n"),
        ("max", "max\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(text)
    assert container_bytes(tmp_path, nowhere) == 1 << 62
    (tmp_path / "memory.max").write_text("1000\n")
    assert container_bytes(tmp_path, nowhere) == 1000 - 700 + 250


def test_limits_of_cgroup_version_1_and_of_the_cgroups_above_count(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/docker/a\n3:cpu,cpuacct:/docker/b\n0::/docker/c\n")
    for folder, limit in (("docker/a", (1 << 63) - 4096), ("docker", 2000), ("docker/b", 1000)):
        path = tmp_path / "memory" / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (path / "memory.usage_in_bytes").write_text("700\n")
        (path / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 250\n")
    assert container_bytes(tmp_path, membership) == 2000 - 700 + 250


def test_a_cache_that_memory_cannot_hold_is_refused_with_one_that_it_can(folder: Path) -> None:
    place = Place(0, 1, torch.device("cpu"))
    with pytest.raises(ValueError) as refused:
        worker.start_rank(place, EngineSettings(folder, dtype="fp32", kv_bytes=1 << 50))
    told = re.fullmatch(
        r"a KV cache of 1.13e\+06 GB was asked for, but each rank has ([\d.,]+) GB left; "
        r"--kv-bytes (\d+) fits",
        str(refused.value),
    )
    assert told and int(told[2]) <= 0.51 * 1e9 * float(told[1].replace(",", ""))
    fits = worker.start_rank(
        place, EngineSettings(folder, dtype="fp32", kv_bytes=min(int(told[2]), 1 << 23))
    )
    assert fits.num_pages == (1 << 23) // fits.runner.page_bytes


@pytest.mark.parametrize(("window", "num_pages"), [(None, 128), (64, 5)])
def test_the_cache_that_is_planned_is_the_least_that_is_served(
    window: int | None, num_pages: int, tmp_path: Path
) -> None:
    """A request of 2,048 tokens, in pages of 16; 64 tokens span at most 5 of them."""
    tiny_model("mistral", vocab_size=264, sliding_window=window).save_pretrained(tmp_path)
    byte_tokenizer().save(tmp_path)
    settings = EngineSettings(tmp_path, dtype="fp32", max_len=2048)
    config = replace(read_config(tmp_path), max_positions=4096)
    (planned,) = serving_ledgers(config, Layout(), settings.max_len or 0, precision="fp32")
    runner = runner_of(load_reference_model(tmp_path, torch.float32, torch.device("cpu")))
    assert planned.rows["kv"] == num_pages * runner.page_bytes

    def chosen(kv_bytes: int) -> int:
        return worker.choose_num_pages(
            runner, replace(settings, kv_bytes=kv_bytes), 2048, planned.rows["kv"]
        )

    assert chosen(planned.rows["kv"]) == num_pages
    with pytest.raises(ValueError, match=f"--max-len {16 * (num_pages - 1)} fits"):
        chosen(planned.rows["kv"] - 1)


def test_scored_prompts_are_in_what_a_batch_is_measured_with(folder: Path) -> None:
    model = load_reference_model(folder, torch.float32, torch.device("cpu"))
    runner = runner_of(model)
    seen = list[Batch]()
    genuine = runner.run
    runner.run = lambda batch: seen.append(batch) or genuine(batch)  # type: ignore[method-assign, func-returns-value]
    num_pages, largest = worker.largest_batch(runner.config, EngineSettings(folder, dtype="fp32"))
    runner.make_pages(num_pages)
    assert worker.measure_batch_bytes(runner, largest) >= 0
    (batch,) = seen
    assert [len(entry.tokens) for entry in batch.entries] == [512, LOGPROB_ROWS + 1]
    pages = [page for entry in batch.entries for page in entry.pages]
    assert batch.entries[1].num_prompt_logprobs == MAX_LOGPROBS and sorted(pages) == list(
        range(runner.pages[0].keys.numbers.shape[1])
    )


def test_logits_of_a_scored_prompt_are_held_in_pieces(folder: Path) -> None:
    """No more than LOGPROB_ROWS of them at a time, whatever the chunk."""
    model = load_reference_model(folder, torch.float32, torch.device("cpu"))
    runner = runner_of(model)
    rows = list[int]()
    genuine = runner.logits
    runner.logits = lambda x: rows.append(len(x)) or genuine(x)  # type: ignore[method-assign, func-returns-value]
    prompt = drawn_tokens(200, 0)
    ((got,),) = answers(
        engine_of(runner, model.tokenizer), [Request(prompt, greedy(1, prompt_logprobs=2))]
    )
    expected = plain_logprobs(model, prompt)[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[
        :, 0
    ]
    assert got.prompt is not None and [each.id for each in got.prompt] == list(prompt[1:])
    assert [each.logprob for each in got.prompt] == pytest.approx(expected.tolist(), abs=1e-4)
    assert rows == [LOGPROB_ROWS] * 3 + [199 - 3 * LOGPROB_ROWS, 1]


def test_the_log_has_the_traceback_and_clients_the_rank() -> None:
    told = (
        "Traceback (most recent call last):\n  File x\nKeyError: 1\nrank 1 failed first, with "
        "exit code 1\nrank 0 ended"
    )
    assert process.in_brief(told) == "rank 1 failed first, with exit code 1; rank 0 ended"
    assert process.in_brief("its process ended with code -9") == "its process ended with code -9"


# -- settings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "fp16"}, "bf16 or fp32"),
        ({"page_tokens": 24}, "16 works"),
        ({"page_tokens": 0}, "16 works"),
        ({"max_batch_tokens": 64}, "65 works"),
        ({"max_queued": 0}, "at least 1"),
        ({"max_len": 1}, "at least 2"),
        ({"kv_bytes": 0}, "at least 1"),
        ({"layout": Layout(dp=2)}, "tp1 works|dp1 works"),
    ],
)
def test_settings_are_refused_at_once(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineSettings(Path("x"), **changes)
