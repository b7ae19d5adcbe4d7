"""A GGUF header, which holds the whole vocabulary, is read once per process of a server."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from shardwise.commands.serve import describe_engine
from shardwise.formats.gguf import gguf_file
from shardwise.parallel.launch import Place
from shardwise.serve.engine.worker import start_rank
from smollm2 import smollm2_gguf


def test_starting_a_server_reads_the_header_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in the process of the server, once in that of the engine."""
    reads: list[Path] = []
    read_part = gguf_file._read_part

    def counted(cursor: gguf_file._Cursor, part: int) -> object:
        reads.append(cursor.path)
        return read_part(cursor, part)

    monkeypatch.setattr(gguf_file, "_read_part", counted)
    args = Namespace(model=str(smollm2_gguf()), tp=None, kv_bytes=1 << 26, max_len=64)
    model, settings = describe_engine(args)
    assert len(reads) == 1
    started = start_rank(Place(0, 1, torch.device("cpu")), settings)
    assert started.runner.config == model.config
    assert started.tokenizer.vocab_size == model.tokenizer.vocab_size
    assert len(reads) == 2
