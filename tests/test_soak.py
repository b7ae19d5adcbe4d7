"""The soak test: 500 requests leave nothing behind, and it detects what goes wrong."""

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soak as bench_soak
from soak_clients import BEHAVIOURS, ClientRequest, draw_request, find_fault
from soak_server import GROWTH_BYTES, SoakResult, growth, soak

from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from tiny_engine import TEMPLATE
from tiny_models import tiny_model

CLEAN = SoakResult(1.0, {"stays": 1}, {200: 1}, (), 0, {"server": ()}, {"server": 0}, 0, 0, 0, True)


def test_clients_leave_nothing_behind(tmp_path: Path) -> None:
    """300 requests or 20 s; bench/soak.py takes minutes. There are 17 pages, one more than the
    longest request needs, so that sequences are preempted."""
    tiny_model("llama-tied", vocab_size=264, max_position_embeddings=256).save_pretrained(tmp_path)
    replace(byte_tokenizer(), eos_ids=frozenset(), chat_template=TEMPLATE).save(tmp_path)
    sizes = ("--dtype", "fp32", "--kv-bytes", "140000", "--max-running", "16")
    with bench_soak.serving(tmp_path, sizes) as served:
        found = asyncio.run(soak(served, 20.0, 0, lambda text: None, 300))
    assert found.ok, found
    assert found.num_requests > 100 and found.num_preemptions > 0
    assert set(found.behaviours) == set(BEHAVIOURS) and set(found.statuses) == {200, 400}
    told = json.loads(bench_soak.to_json(found))
    assert told["ok"] and told["num_requests"] == found.num_requests == sum(
        told["behaviours"].values()
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"failures": ("500",)},
        {"pages_used": 1},
        {"num_in_flight": 1},
        {"num_files_left": 1},
        {"pages_constant": False},
        {"growth_bytes": {"server": 0, "engine": GROWTH_BYTES + 1}},
    ],
)
def test_what_is_left_is_not_ok(changes: dict[str, Any]) -> None:
    assert CLEAN.ok and not replace(CLEAN, **changes).ok


def test_growth_is_what_the_last_third_has_over_the_middle() -> None:
    assert growth([9, 9, 9, 1, 2, 3, 7, 8, 90]) == 8 - 2 and growth([]) == growth([5, 9]) == 0


@pytest.mark.parametrize(
    ("behaviour", "streams", "status", "answer", "says"),
    [
        ("stays", False, 200, b"{}", None),
        ("stays", False, 429, b"{}", None),
        ("stays", False, 500, b"it broke", "500: b'it broke'"),
        ("stays", True, 200, b"data: {}\n\ndata: [DONE]\n\n", None),
        ("stays", True, 200, b'data: {"token": "error"}\n\ndata: [DONE]\n\n', None),
        ("stays", True, 200, b"data: {}\n\n", "a stream ended with"),
        ("stays", True, 200, b'data: {"error": {}}\n\ndata: [DONE]\n\n', "a stream ended with"),
        ("sends nonsense", True, 400, b"{}", None),
        ("sends nonsense", False, 200, b"{}", "200"),
    ],
)
def test_what_is_wrong_with_an_answer(
    behaviour: str, streams: bool, status: int, answer: bytes, says: str | None
) -> None:
    told = find_fault(
        ClientRequest("/v1/completions", {"stream": streams}, behaviour, None, False),
        status,
        answer,
    )
    assert told is None if says is None else told is not None and says in told


def test_drawn_requests_fit() -> None:
    rng = random.Random(0)
    for drawn in (draw_request(rng, 256) for _ in range(2000)):
        if drawn.behaviour != "sends nonsense" and "max_tokens" in drawn.body:
            texts = drawn.body.get("prompt") or [str(drawn.body["messages"])]
            assert max(len(text.encode()) for text in texts) + drawn.body["max_tokens"] <= 256
