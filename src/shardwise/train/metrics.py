"""What a run tells: a line of JSON a step, a progress bar, and TensorBoard for those who look
there."""

import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.hardware import device_for
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.peak_memory import peak_memory_bytes

MATRIX_SIZE = 1024
SECONDS_BETWEEN_LINES = 10.0
"""Of progress, where there is no terminal to draw a bar on."""


@dataclass(frozen=True)
class StepMetrics:
    """One step over all ranks. `mfu` is the share of the devices' peak that model operations used
    (recompute not counted); `peak_bytes` is each rank's, `comm_bytes` what rank 0 sent, by the axis
    that caused it."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float
    mfu: float
    peak_bytes: list[int]
    comm_bytes: dict[str, int]


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of this rank's device: published for a known GPU, else measured on a
    matrix product."""
    if (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and (known := device_for(torch.cuda.get_device_name(device)))
    ):
        return known.bf16_flops
    x = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device).to(dtype)
    best_s = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        y = x @ x
        y[0, 0].item()
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * MATRIX_SIZE**3 / best_s


class Meter:
    """Turns the time of a step into what is told of it. Every rank makes one and reads it at every
    step."""

    def __init__(self, mesh: Mesh, tokens: int, flops_per_token: int, dtype: torch.dtype) -> None:
        self.mesh = mesh
        self.tokens = tokens
        self.flops_per_token = flops_per_token
        self.peak_flops = mesh.world.sum(peak_flops(mesh.device, dtype))[0]

    def read(
        self, step: int, loss: float, grad_norm: float, lr: float, seconds: float
    ) -> StepMetrics:
        rate = self.tokens / seconds
        return StepMetrics(
            step,
            loss,
            grad_norm,
            lr,
            step * self.tokens,
            rate,
            rate * self.flops_per_token / self.peak_flops,
            [
                int(num_bytes)
                for num_bytes in self.mesh.world.gather(peak_memory_bytes(self.mesh.device))
            ],
            self.mesh.bytes_sent(),
        )


class LastingStream:
    """A stream that may go away, as a closed terminal does: the run that writes to it goes on, and
    can be saved."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding
        self.isatty = stream.isatty
        self.fileno = stream.fileno

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class Metrics:
    """Writes `metrics.jsonl` in the run's folder and shows progress on stderr: on rank 0 only,
    elsewhere silent.

    Lines after `resumed_step` are of a run that was cut off and are dropped; at 0 all are, since it
    starts anew.
    """

    def __init__(
        self, folder: Path, steps: int, resumed_step: int, tensorboard: bool, active: bool
    ) -> None:
        self.active = active
        if not active:
            return
        path = folder / "metrics.jsonl"
        kept = [line for line in read_lines(path) if resumed_step and step_of(line) <= resumed_step]
        path.write_text("".join(line + "\n" for line in kept))
        self._file = path.open("a", buffering=1)
        self._is_written = True
        self._board = open_tensorboard(folder) if tensorboard else None
        self._console = Console(file=cast(TextIO, LastingStream(sys.stderr)))
        self._progress = Progress(
            TextColumn("[bold]train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=steps, completed=resumed_step, told="")
        self._told_at = 0.0
        self._progress.start()

    def step(self, metrics: StepMetrics) -> None:
        if not self.active:
            return
        self._write(asdict(metrics))
        told = (
            f"loss {metrics.loss:.3f}  {metrics.tokens_per_s:,.0f} tokens/s  MFU {metrics.mfu:.0%}  "
            f"{max(metrics.peak_bytes) / 1e9:.2f} GB"
        )
        self._progress.update(self._task, completed=metrics.step, told=told)
        if (
            not self._console.is_terminal
            and time.monotonic() - self._told_at >= SECONDS_BETWEEN_LINES
        ):
            self._told_at = time.monotonic()
            self.say(f"step {metrics.step:>6}  {told}")

    def held_out(self, step: int, loss: float, comm_bytes: dict[str, int]) -> None:
        if self.active:
            self._write({"step": step, "held_out_loss": loss, "comm_bytes": comm_bytes})
            self.say(f"step {step:>6}  held-out loss {loss:.3f}")

    def say(self, text: str) -> None:
        """A line for people, above the progress bar."""
        if self.active:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self.active:
            self._progress.stop()
            with suppress(OSError):  # of lines that could not be written, which was told
                self._file.close()
            if self._board is not None:
                self._board.close()

    def _write(self, row: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:  # a full disk is no reason to lose the run
            if self._is_written:
                self.say(
                    f"{self._file.name} cannot be written: {error.strerror}; the run goes on without"
                )
            self._is_written = False
        if self._board is not None:
            for name, value in row.items():
                if isinstance(value, int | float) and name != "step":
                    self._board.add_scalar(name, value, row["step"])


def read_lines(path: Path) -> list[str]:
    """Whole lines of a JSON lines file; the last one may have been cut off by a kill."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return whole.split("\n") if whole else []


def step_of(line: str) -> float:
    """The step of a line of metrics; one that is none is of no step that was ever reached."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return float("inf")


def open_tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "run.tensorboard needs the extra: pip install 'shardwise[tensorboard]'"
        ) from None
    return SummaryWriter(str(folder / "tensorboard"))
