"""Long texts: short ones do not wait for them, and they end with their client, at the limit, and
with the server."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.serve.api.encoder import LARGE, SHORT, TextEncoder
from shardwise.serve.engine_client import EngineDied

PATIENCE_S = 60.0  # only a test that fails waits that long
ENDLESS = "endless" + " " * SHORT
LONG = "long" + " " * SHORT


class Stubborn(Tokenizer):
    """A tokenizer that never comes back from some texts."""

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        while text.startswith("endless"):
            pass
        return super().encode(text, special_tokens)


def encoder(limit_s: float = PATIENCE_S) -> TextEncoder:
    plain = byte_tokenizer()
    return TextEncoder(Stubborn(plain.backend, plain.special, plain.eos_ids), limit_s)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, PATIENCE_S))


async def started(texts: TextEncoder) -> int:
    """Return the process id once a long text is in work."""
    while texts.process.process is None or texts.process.current is None:
        await asyncio.sleep(0.001)
    assert texts.process.process.pid is not None
    return texts.process.process.pid


def ids(text: str) -> Sequence[int]:
    return list(text.encode())


def test_short_texts_overtake_long_ones_which_end_with_their_client() -> None:
    async def scenario() -> None:
        texts = encoder()
        endless = [asyncio.create_task(texts.encode(ENDLESS, False)) for _ in range(10)]
        first = await started(texts)
        assert await texts.encode("short", False) == ids("short")
        assert await texts.decode([72, 105]) == "Hi"
        for task in endless:
            task.cancel()
        await asyncio.gather(*endless, return_exceptions=True)
        assert await texts.encode(LONG, False) == ids(LONG)
        process = texts.process.process
        assert process is not None and process.pid != first
        assert await texts.decode(ids(LONG)) == LONG and texts.process.process is process
        large = "x" * LARGE
        assert await texts.encode(large, False) == ids(large)
        assert texts.process.process is None  # and its memory is back

    run(scenario())


def test_a_text_has_a_time_limit_and_errors_are_those_of_the_tokenizer() -> None:
    async def scenario() -> None:
        texts = encoder(limit_s=0.2)
        with pytest.raises(ValueError, match=r"the text takes more than 0.2 s; shorten it"):
            await texts.encode(ENDLESS, False)
        texts.process.limit_s = PATIENCE_S
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            await texts.encode("\ud800" * (SHORT + 1), False)
        endless = asyncio.create_task(texts.encode(ENDLESS, False))
        await started(texts)
        texts.close()
        with pytest.raises(EngineDied, match="try again"):
            await endless

    run(scenario())
