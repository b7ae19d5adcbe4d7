"""The `generate` of transformers on the requests of `shardwise bench serve`: prints output tokens/s
as a line of JSON.

    python bench/serve_peers.py FOLDER SEQUENCES PROMPT_TOKENS NEW_TOKENS REPEATS

Runs in an environment of its own with torch and transformers, without Shardwise. SEQUENCES prompts
of the same length are one batch, which needs no padding, greedy, and run to their full length. The
dynamic and the static cache take turns; the faster counts.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM

COMMON_IDS = (256, 8192)
CACHES = {"dynamic": None, "static": "static"}


def main(folder: str, sequences: int, prompt_tokens: int, new_tokens: int, repeats: int) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    ids = COMMON_IDS if model.config.vocab_size >= COMMON_IDS[1] else (0, model.config.vocab_size)

    def generate(cache: str | None, num_new: int) -> float:
        prompts = torch.randint(*ids, (sequences, prompt_tokens))
        began = time.perf_counter()
        made = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=num_new,
            max_new_tokens=num_new,
            cache_implementation=cache,
            pad_token_id=0,
        )
        took_s = time.perf_counter() - began
        assert made.shape == (sequences, prompt_tokens + num_new)
        return took_s

    seconds: dict[str, list[float]] = {name: [] for name in CACHES}
    with torch.inference_mode():
        for cache in CACHES.values():
            generate(cache, 2)
        for _ in range(repeats):
            for name, cache in CACHES.items():
                seconds[name].append(generate(cache, new_tokens))
    rates = {name: sequences * new_tokens * len(each) / sum(each) for name, each in seconds.items()}
    print(
        json.dumps(
            {"output_tokens_per_s": max(rates.values()), "threads": torch.get_num_threads()} | rates
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]))
