"""Training data: packed samples of a token file, in an order that follows from a seed and the step.

Sample i is the window [i T, i T + T + 1) of the concatenated documents: T inputs, and the same
shifted by one as targets. Step s of a run takes the samples `order[s G] .. order[s G + G - 1]`,
whatever the layout, so the step is the whole state of the loader.

B sequences per micro-batch and data rank, T tokens, G sequences per global batch, M micro-batches,
D data ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from shardwise.model.batch import MicroBatch
from shardwise.model.loss import IGNORE_INDEX
from shardwise.train.data.corpus import START_DTYPE, read_corpus
from shardwise.train.global_batch import check_divides

NUM_ROUNDS = 8  # 4 suffice for many samples; 8 also shuffle a handful evenly


class TokenFile:
    """One split of a data set, mapped into memory: the ranks of a machine share its pages and read
    only what they use.

    `split` is "train" or "held_out". Raises ValueError if the folder is not a data set, lacks the
    split or is damaged.
    """

    def __init__(self, folder: Path, split: str = "train") -> None:
        corpus = read_corpus(folder)
        if split not in corpus.splits:
            raise ValueError(
                f"{folder} has no {split} split, only {', '.join(corpus.splits)}; "
                "build it with one."
            )
        self.name = f"The {split} split of {folder}"
        self.vocab_size = corpus.vocab_size
        self.end_of_text = corpus.end_of_text
        self.num_tokens = corpus.splits[split].tokens
        self.num_documents = corpus.splits[split].documents
        self.tokens = mapped(
            folder / f"{split}.bin", np.dtype(corpus.dtype).newbyteorder("<"), self.num_tokens
        )
        self.starts = mapped(folder / f"{split}.idx", START_DTYPE, self.num_documents)

    def num_samples(self, seq_len: int) -> int:
        """Return the number of samples of `seq_len` inputs. Raises ValueError if there is none."""
        if seq_len < 1:
            raise ValueError(f"A sequence has at least 1 token, not {seq_len}.")
        num_samples = (self.num_tokens - 1) // seq_len
        if num_samples < 1:
            longest = (
                f"at most {self.num_tokens - 1} work" if self.num_tokens > 1 else "no sequence fits"
            )
            raise ValueError(
                f"{self.name} holds {self.num_tokens} tokens, too few for a sequence of {seq_len} "
                f"and its last target; {longest}."
            )
        return num_samples

    def window(self, start: int, length: int) -> np.ndarray:
        """Return the tokens [start, start + length), a view of the file in its own dtype."""
        assert start >= 0 and start + length <= self.num_tokens
        return self.tokens[start : start + length]

    def documents(self, start: int, length: int) -> np.ndarray:
        """Return the document number of each token of a window, int64 [length]."""
        first_in, first_after = np.searchsorted(self.starts, [start + 1, start + length])
        steps = np.zeros(length, dtype=np.int64)
        steps[self.starts[first_in:first_after] - start] = 1
        return first_in - 1 + np.cumsum(steps)


def mapped(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    """Map a file of `length` elements into memory. Raises ValueError if it has another size."""
    expected_bytes = length * dtype.itemsize
    file_bytes = path.stat().st_size if path.is_file() else 0
    if file_bytes != expected_bytes or not length:
        raise ValueError(
            f"{path} is damaged: it has {file_bytes} bytes where data.json says {expected_bytes}; "
            "build it again."
        )
    return np.memmap(path, dtype=dtype, mode="r", shape=(length,))


# -- order


@dataclass(frozen=True)
class Order:
    """An endless shuffled order of samples: a function of (seed, index) in constant memory.

    `order[index]` for index 0, 1, 2, ... visits all samples once per epoch, in another order in
    each. Within an epoch the index is encrypted by a small block cipher, which is a permutation by
    construction: a Feistel network with a hash as round function (Luby and Rackoff, 1988) over the
    smallest domain of 2^(2h) numbers that holds all samples. A number beyond the last sample is
    encrypted again until it is not; this "cycle walking" (Black and Rogaway, 2002) keeps it a
    permutation of the samples, and takes at most four rounds on average.
    """

    num_samples: int
    seed: int

    def __post_init__(self) -> None:
        assert self.num_samples >= 1

    def __getitem__(self, index: int) -> int:
        assert index >= 0
        epoch, number = divmod(index, self.num_samples)
        keys = round_keys(self.seed, epoch)
        half_bits = ((self.num_samples - 1).bit_length() + 1) // 2
        while True:
            number = feistel(number, half_bits, keys)
            if number < self.num_samples:
                return number


@lru_cache(maxsize=8)
def round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(mix(mix(mix(seed) + epoch) + number) for number in range(NUM_ROUNDS))


def feistel(number: int, half_bits: int, keys: tuple[int, ...]) -> int:
    """Permute the numbers of 2 x `half_bits` bits by a key."""
    mask = (1 << half_bits) - 1
    left = number >> half_bits
    right = number & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return left << half_bits | right


def mix(number: int) -> int:
    """Hash 64 bits by a step of SplitMix64 (Steele, Lea and Flood, 2014)."""
    word = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return word ^ word >> 31


# -- batches


@dataclass(frozen=True, eq=False)
class Batch:
    """One data rank's part of a global batch; targets of -100 are not counted in `num_targets`."""

    microbatches: tuple[MicroBatch, ...]
    num_targets: int


def batch_rows(global_batch: int, microbatches: int, data_rank: int, data_size: int) -> list[range]:
    """Return the rows of a global batch of G sequences that a data rank takes, per micro-batch.

    With B = G / (M D), micro-batch m of data rank d has the rows (m D + d) B + b for b < B: one
    micro-batch after another, and within it the ranks in order.
    """
    num_rows = global_batch // (microbatches * data_size)
    firsts = [(m * data_size + data_rank) * num_rows for m in range(microbatches)]
    return [range(first, first + num_rows) for first in firsts]


@dataclass(frozen=True)
class Batches:
    """One data rank's training batches, each a function of its step alone: resuming needs the step
    and nothing else.

    Row j of the global batch of step s is sample `order[s G + j]`; `batch_rows` gives the rows of a
    data rank. Ranks that share sequences (tensor, pipeline and context parallel) pass the same
    `data_rank` and get the same rows.

    With `separate_documents`, positions restart where a document starts (and at the start of the
    window), `documents` are set, and the last token of a document has no target. Otherwise
    positions are 0 .. T - 1.

    Raises ValueError if G is not a multiple of M D, or if the split is shorter than one sample.
    """

    token_file: TokenFile
    seq_len: int
    global_batch: int
    microbatches: int
    data_rank: int
    data_size: int
    seed: int
    separate_documents: bool = False

    def __post_init__(self) -> None:
        assert self.microbatches >= 1 and 0 <= self.data_rank < self.data_size
        self.token_file.num_samples(self.seq_len)
        check_divides(self.global_batch, self.data_size, self.microbatches)

    def batch(self, step: int) -> Batch:
        """Return the batch of `step`, counting from 0."""
        order = Order(self.token_file.num_samples(self.seq_len), self.seed)
        rows = batch_rows(self.global_batch, self.microbatches, self.data_rank, self.data_size)
        first = step * self.global_batch
        samples = [[order[first + row] for row in of_microbatch] for of_microbatch in rows]
        return collate(self.token_file, samples, self.seq_len, self.separate_documents)


def held_out_batches(
    token_file: TokenFile,
    seq_len: int,
    batch: int,
    data_rank: int,
    data_size: int,
    limit: int | None = None,
    separate_documents: bool = False,
) -> Iterator[Batch]:
    """Return one data rank's part of the samples in their own order, for an evaluation that is the
    same in every layout.

    At most `limit` samples are used over all ranks (None: all). Each batch has one micro-batch of
    `batch` sequences; rank d takes the samples (k D + d) B + b of batch k. Every rank gets the same
    number of batches, since a collective may follow each: rows beyond the last sample have -100 as
    targets.
    """
    assert batch >= 1 and 0 <= data_rank < data_size
    num_samples = token_file.num_samples(seq_len)
    if limit is not None:
        if limit < 1:
            raise ValueError(f"An evaluation takes at least 1 sequence, not {limit}.")
        num_samples = min(limit, num_samples)
    firsts = range(data_rank * batch, data_rank * batch + num_samples, data_size * batch)
    rows = (
        [first + b if first + b < num_samples else None for b in range(batch)] for first in firsts
    )
    return (collate(token_file, [samples], seq_len, separate_documents) for samples in rows)


def collate(
    token_file: TokenFile,
    samples: Sequence[Sequence[int | None]],
    seq_len: int,
    separate_documents: bool,
) -> Batch:
    """Return samples, listed per micro-batch, as tensors; None is a row without targets."""
    microbatches = tuple(stack(token_file, rows, seq_len, separate_documents) for rows in samples)
    return Batch(microbatches, num_targets(microbatches))


def num_targets(microbatches: Sequence[MicroBatch]) -> int:
    return sum(int((each.targets != IGNORE_INDEX).sum()) for each in microbatches)


def stack(
    token_file: TokenFile, samples: Sequence[int | None], seq_len: int, separate_documents: bool
) -> MicroBatch:
    """Return the samples of one micro-batch as int64 tensors [B, T]."""
    shape = (len(samples), seq_len)
    tokens = np.zeros(shape, dtype=np.int64)
    targets = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    positions = np.tile(np.arange(seq_len, dtype=np.int64), (len(samples), 1))
    documents = np.zeros(shape, dtype=np.int64)
    for row, sample in enumerate(samples):
        if sample is None:
            continue
        window = token_file.window(sample * seq_len, seq_len + 1)
        tokens[row] = window[:-1]
        targets[row] = window[1:]
        if separate_documents:
            numbers = token_file.documents(sample * seq_len, seq_len + 1)
            continues = numbers[1:] == numbers[:-1]
            targets[row, ~continues] = IGNORE_INDEX
            starts = np.where(continues[:-1], 0, positions[row, 1:])
            positions[row, 1:] -= np.maximum.accumulate(starts)
            documents[row] = numbers[:-1]
    return MicroBatch(
        torch.from_numpy(tokens),
        torch.from_numpy(targets),
        torch.from_numpy(positions),
        torch.from_numpy(documents) if separate_documents else None,
    )
