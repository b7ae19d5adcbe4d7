"""llama.cpp on a GGUF file: prints the rows of `shardwise bench serve MODEL --json` as a line of
JSON, or the perplexity of a text.

    python bench/serve_llama_cpp.py speed FILE.gguf THREADS [TRIES]
    python bench/serve_llama_cpp.py perplexity FILE.gguf THREADS TOKENS.json CONTEXT
    python bench/serve_llama_cpp.py requantize FILE.gguf FOLDER [KIND ...]

Runs in an environment of its own with llama-cpp-python and gguf, without Shardwise.
"""

import json
import sys
import time
from pathlib import Path

PROMPT_TOKENS = 128
LONG_PROMPT_TOKENS = 512
STEPS = 24
TRIES = 3
SIZES = (1, 8, 32)
FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "BF16": 32}


class Model:
    """A context for many sequences, through the C interface: the Python one has a single
    sequence."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp

        self.c = llama_cpp
        self.c.llama_backend_init()
        self.silent = self.c.llama_log_callback(lambda *_: None)
        self.c.llama_log_set(self.silent, None)
        model = self.c.llama_model_load_from_file(
            path.encode(), self.c.llama_model_default_params()
        )
        settings = self.c.llama_context_default_params()
        settings.n_ctx = 1024 * max(SIZES)
        settings.n_batch = 512
        settings.n_ubatch = 512
        settings.n_seq_max = max(SIZES)
        settings.n_threads = threads
        settings.n_threads_batch = threads
        self.context = self.c.llama_init_from_model(model, settings)
        self.vocab_size = self.c.llama_vocab_n_tokens(self.c.llama_model_get_vocab(model))

    def run(self, tokens: list[tuple[int, int, int]], every: bool = False) -> None:
        """Decode (token, sequence, position) triples, with logits of the last token of each
        sequence, or of every token."""
        last = {sequence: number for number, (_, sequence, _) in enumerate(tokens)}
        batch = self.c.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for number, (token, sequence, position) in enumerate(tokens):
            batch.token[number] = token
            batch.pos[number] = position
            batch.n_seq_id[number] = 1
            batch.seq_id[number][0] = sequence
            batch.logits[number] = every or last[sequence] == number
        status = self.c.llama_decode(self.context, batch)
        self.c.llama_synchronize(self.context)
        self.c.llama_batch_free(batch)
        if status:
            sys.exit(f"llama_decode returned {status}")

    def clear(self) -> None:
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)


def speed(path: str, threads: int, tries: int = TRIES) -> dict[str, float]:
    model = Model(path, threads)

    def prompt(length: int, sequence: int) -> None:
        model.run([(place % model.vocab_size, sequence, place) for place in range(length)])

    def prefill_s() -> float:
        model.clear()
        start = time.perf_counter()
        prompt(LONG_PROMPT_TOKENS, 0)
        return time.perf_counter() - start

    def decode_s(size: int) -> float:
        model.clear()
        for sequence in range(size):
            prompt(PROMPT_TOKENS, sequence)
        start = time.perf_counter()
        for step in range(STEPS):
            model.run(
                [(step + sequence, sequence, PROMPT_TOKENS + step) for sequence in range(size)]
            )
        return time.perf_counter() - start

    rows = {
        f"prefill_{LONG_PROMPT_TOKENS}": LONG_PROMPT_TOKENS / min(prefill_s() for _ in range(tries))
    }
    return rows | {
        f"decode_{size}": size * STEPS / min(decode_s(size) for _ in range(tries)) for size in SIZES
    }


def perplexity(path: str, threads: int, tokens: list[int], context: int) -> dict[str, float]:
    """Score windows without overlap; the first token of each follows the last of the one before."""
    import numpy as np

    model = Model(path, threads)
    nll = 0.0
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start : min(start + context, len(tokens) - 1)]
        model.clear()
        model.run([(token, 0, place) for place, token in enumerate(window)], every=True)
        shape = len(window), model.vocab_size
        logits = np.ctypeslib.as_array(model.c.llama_get_logits(model.context), shape).astype(
            np.float64
        )
        logits -= logits.max(1, keepdims=True)
        following = tokens[start + 1 : start + 1 + len(window)]
        nll += float(
            (np.log(np.exp(logits).sum(1)) - logits[np.arange(len(window)), following]).sum()
        )
    return {"perplexity": float(np.exp(nll / (len(tokens) - 1)))}


def requantize(path: str, folder: Path, kinds: list[str]) -> dict[str, str]:
    """Quantize the dequantized weights to other formats; as in llama.cpp's own tool, Q4_0 has its
    embedding in Q8_0."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

    source = GGUFReader(path)
    written = {}
    for name in kinds or ("Q4_0", "Q8_0"):
        target = folder / f"{Path(path).stem}.{name}.gguf"
        writer = GGUFWriter(target, str(source.fields["general.architecture"].contents()))
        for key, field in source.fields.items():
            if key.startswith("GGUF.") or key == "general.architecture":
                continue
            value = FILE_TYPES[name] if key == "general.file_type" else field.contents()
            if field.types[0] == GGUFValueType.ARRAY:
                writer.add_array(key, value)
            else:
                writer.add_key_value(key, value, field.types[0])
        for tensor in source.tensors:
            plain = quants.dequantize(tensor.data, tensor.tensor_type)
            kind = GGMLQuantizationType.F32
            if len(tensor.shape) == 2:
                kind = GGMLQuantizationType[
                    "Q8_0" if tensor.name == "token_embd.weight" and name != "BF16" else name
                ]
            writer.add_tensor(
                tensor.name, quants.quantize(plain.astype("float32"), kind), raw_dtype=kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        written[name] = str(target)
    return written


if __name__ == "__main__":
    what, path, *rest = sys.argv[1:]
    if what == "speed":
        result: object = speed(path, *map(int, rest))
    elif what == "perplexity":
        result = perplexity(path, int(rest[0]), json.loads(Path(rest[1]).read_text()), int(rest[2]))
    else:
        result = requantize(path, Path(rest[0]), rest[1:])
    print(json.dumps(result))
