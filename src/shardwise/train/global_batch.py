"""Divides a global batch among data ranks and micro-batches. Imports no torch."""


def check_divides(num_sequences: int, data_size: int, microbatches: int) -> None:
    """Raise ValueError, with the nearest sizes that work, unless each data rank gets as many
    sequences in each micro-batch."""
    multiple = microbatches * data_size
    if num_sequences >= 1 and num_sequences % multiple == 0:
        return
    below = num_sequences // multiple * multiple
    nearest = f"{below} or {below + multiple}" if below > 0 else f"{multiple}"
    raise ValueError(
        f"A global batch of {num_sequences} sequences does not divide among {data_size} data ranks "
        f"x {microbatches} micro-batches; {nearest} would."
    )
