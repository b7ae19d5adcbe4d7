"""Check that llama.cpp and Shardwise compute the same from the GGUF files that `shardwise convert
--quant gguf:...` writes.

    python3 -m venv .peers/llama && .peers/llama/bin/pip install llama-cpp-python  # minutes
    .venv/bin/python bench/check_gguf.py FILE.gguf ... --python .peers/llama/bin/python

Both tokenize the same text and predict each next token. llama.cpp rounds activations to 8 bits for
its products, so distributions agree to a small KL divergence, not bit for bit. Exit 1 if they
differ.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TEXT = (
    "The water of the sea is salt because rivers carry minerals from the land into it, and only "
    "the water leaves. "
    "In 1715 Edmond Halley proposed to measure the sea's age by it: 3 times 5 is 15, isn't it?\n"
)
MOST_KL = 0.02
"""Nats, on average. A wrong order of rows or a wrong scale costs whole nats."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument(
        "--python",
        required=True,
        metavar="PYTHON",
        help="Python of an environment with llama-cpp-python",
    )
    args = parser.parse_args(argv)
    return max(compare(Path(file), args.python) for file in args.files)


def compare(file: Path, python: str) -> int:
    import torch

    from shardwise.measure.reference_model import load_reference_model

    command = [python, __file__, str(file), "--python", "--as-llama-cpp"]
    answer = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    model = load_reference_model(file, torch.float32, torch.device("cpu"))
    tokens = model.tokenizer.encode(TEXT, special_tokens=True)
    if tokens != answer["tokens"]:
        print(f"{file.name}: tokens differ: {tokens} here, {answer['tokens']} in llama.cpp")
        return 1
    ours = torch.cat(list(model.logits(torch.tensor(tokens), len(tokens)))).log_softmax(-1)
    theirs = torch.tensor(answer["logits"]).log_softmax(-1)
    kl = float((ours.exp() * (ours - theirs)).sum(-1).mean())
    same = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    print(f"{file.name}: {len(tokens)} tokens, KL {kl:.5f} nats, same top token {100 * same:.1f} %")
    return int(not kl <= MOST_KL)


def as_llama_cpp(file: str) -> None:
    """Print tokens of the text and logits after each as JSON; runs in the other environment."""
    from llama_cpp import Llama

    llama = Llama(file, n_ctx=512, n_threads=1, logits_all=True, verbose=False)
    tokens = llama.tokenize(TEXT.encode(), add_bos=True, special=True)
    llama.eval(tokens)
    print(json.dumps({"tokens": tokens, "logits": llama.scores[: len(tokens)].tolist()}))


if __name__ == "__main__":
    if "--as-llama-cpp" in sys.argv:
        as_llama_cpp(sys.argv[1])
    else:
        sys.exit(main())
