"""OpenVINO GenAI on a GGUF file: prints the rows `generate_N` of `shardwise bench serve MODEL
--json` as a line of JSON: N requests that start together, with continuous batching, and
the same prompts and lengths.

    python bench/serve_openvino.py FILE.gguf THREADS

Runs in an environment of its own with openvino-genai, without Shardwise.
"""

import json
import sys
import time

import numpy as np
import openvino
import openvino_genai

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 128
TRIES = 3
SIZES = (1, 8, 32)
COMMON_IDS = 49152
CACHE_GB = 2
STEP_TOKENS = 512


def speed(path: str, threads: int) -> dict[str, float]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_batched_tokens = STEP_TOKENS
    scheduler.enable_prefix_caching = False
    settings = {"INFERENCE_NUM_THREADS": threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", settings, {})
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = OUTPUT_TOKENS
    config.ignore_eos = True

    def generate_s(size: int) -> float:
        prompts = [
            openvino.Tensor(
                np.array(
                    [[(number * 7919 + place * 31) % COMMON_IDS for place in range(PROMPT_TOKENS)]]
                )
            )
            for number in range(size)
        ]
        start = time.perf_counter()
        outputs = pipeline.generate(prompts, [config] * size)
        seconds = time.perf_counter() - start
        if any(len(each.m_generation_ids[0]) != OUTPUT_TOKENS for each in outputs):
            sys.exit("a completion does not have the requested length")
        return seconds

    return {
        f"generate_{size}": size * OUTPUT_TOKENS / min(generate_s(size) for _ in range(TRIES))
        for size in SIZES
    }


if __name__ == "__main__":
    print(json.dumps(speed(sys.argv[1], int(sys.argv[2]))))
