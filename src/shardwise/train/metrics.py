"""Metrics of a run: one line of JSON per step, a progress bar, and TensorBoard events."""

import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.hardware import device_for
from shardwise.parallel.memory import peak_memory_bytes
from shardwise.parallel.mesh import Mesh
from shardwise.writing.json_text import json_text
from shardwise.writing.lasting_stream import lasting

SMALLEST_MATRIX = 128
MATRIX_SIZE = 1024
"""Sizes between which the product lies that measures the peak of a device."""
MEASURED_S = 0.02
"""A product that takes this long is large enough: bf16 is slow on CPUs without instructions for
it."""
SECONDS_BETWEEN_LINES = 10.0
"""The interval of progress lines where there is no terminal to draw a bar on."""


@dataclass(frozen=True)
class StepMetrics:
    """One step over all ranks.

    Attributes:
        mfu: FLOPs of the model, recompute excluded, over the peak of the devices
        peak_bytes: peak memory of each rank
        comm_bytes: bytes that rank 0 sent, by axis
    """

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
    """Return the peak FLOPs per second of this rank's device: the published figure of a known GPU
    in bf16, otherwise measured on a matrix product."""
    if (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and (known := device_for(torch.cuda.get_device_name(device)))
    ):
        return known.bf16_flops
    size = SMALLEST_MATRIX
    while (seconds := matmul_s(size, device, dtype)) < MEASURED_S and size < MATRIX_SIZE:
        size *= 2
    return 2 * size**3 / seconds


def matmul_s(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the shortest time of four products of two matrices [size, size]."""
    x = torch.randn(size, size, device=device).to(dtype)
    best_s = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        y = x @ x
        y[0, 0].item()
        best_s = min(best_s, time.perf_counter() - start)
    return best_s


class Meter:
    """Computes the metrics of a step from its duration. Every rank creates one and reads it at
    every step, since it communicates."""

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
            [int(peak) for peak in self.mesh.world.gather(peak_memory_bytes(self.mesh.device))],
            self.mesh.bytes_sent(),
        )


class Metrics:
    """Writes `metrics.jsonl` in the run's folder and shows progress on stderr, on the rank that is
    `active`; on the others it does nothing. `shows_mfu` puts the MFU into the progress: where the
    peak is a published one, since that of a CPU is measured, and varies with its other work.

    Lines after `resumed_step` come from steps that were not saved and are dropped; at 0 all lines
    are dropped.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        resumed_step: int,
        tensorboard: bool,
        active: bool,
        shows_mfu: bool = False,
    ) -> None:
        self.active = active
        self._shows_mfu = shows_mfu
        if not active:
            return
        path = folder / "metrics.jsonl"
        lines = read_lines(path) if resumed_step else []
        path.write_text("".join(line + "\n" for line in lines if step_of(line) <= resumed_step))
        self._file = path.open("a", buffering=1)
        self._is_written = True
        self._board = open_tensorboard(folder, resumed_step) if tensorboard else None
        self._console = Console(file=lasting(sys.stderr))
        self._progress = Progress(
            TextColumn("[bold]train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(
            "train", total=steps, completed=resumed_step, status=""
        )
        self._logged_at = 0.0
        self._progress.start()

    def step(self, metrics: StepMetrics) -> None:
        if not self.active:
            return
        self._write(asdict(metrics))
        mfu = f"MFU {metrics.mfu:.0%}  " if self._shows_mfu else ""
        status = (
            f"loss {metrics.loss:.3f}  {metrics.tokens_per_s:,.0f} tokens/s  "
            f"{mfu}{max(metrics.peak_bytes) / 1e9:.2f} GB"
        )
        self._progress.update(self._task, completed=metrics.step, status=status)
        is_due = time.monotonic() - self._logged_at >= SECONDS_BETWEEN_LINES
        if is_due and not self._console.is_terminal:
            self._logged_at = time.monotonic()
            self.log(f"step {metrics.step:>6}  {status}")

    def held_out(self, step: int, loss: float, comm_bytes: dict[str, int]) -> None:
        if self.active:
            self._write({"step": step, "held_out_loss": loss, "comm_bytes": comm_bytes})
            self.log(f"step {step:>6}  held-out loss {loss:.3f}")

    def log(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.active:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self.active:
            self._progress.stop()
            with suppress(OSError):  # a failed write was logged already
                self._file.close()
            if self._board is not None:
                self._board.close()

    def _write(self, row: dict[str, Any]) -> None:
        try:
            self._file.write(json_text(row) + "\n")
        except OSError as error:  # a full disk must not end the run
            if self._is_written:
                self.log(
                    f"{self._file.name} cannot be written: {error.strerror}; "
                    "the run continues without it"
                )
            self._is_written = False
        if self._board is not None:
            for name, value in row.items():
                if isinstance(value, int | float) and name != "step":
                    self._board.add_scalar(name, value, row["step"])


def read_lines(path: Path) -> list[str]:
    """Return the complete lines of a JSON lines file; a kill may have truncated the last one."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return whole.split("\n") if whole else []


def step_of(line: str) -> float:
    """Return the step of a line of metrics; infinity for a line that is not valid."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return float("inf")


def open_tensorboard(folder: Path, step: int) -> Any:
    """Return a writer of events after `step`; later ones, of a run that was killed, are hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "run.tensorboard needs an extra: in the clone, pip install '.[tensorboard]'"
        ) from None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)
