"""The live twin of a `Layout`: one `Axis` per way the ranks are grouped, and every collective goes through one.

An axis of one rank is the identity, so no caller asks whether it is cut. An axis counts the bytes that this rank sends
as a ring moves them: 2S(n-1)/n for an all-reduce of S bytes among n ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.layout import AxisName, Coord, Layout

Operation = Literal["sum", "max"]
OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class CollectiveFailed(RuntimeError):
    """A collective broke off, most likely because another rank of its axis has ended."""


@dataclass
class Pending:
    """A collective under way. `wait` returns when its result is in place; it raises CollectiveFailed."""

    axis: str
    work: dist.Work | None = None
    then: Callable[[], object] | None = None

    def wait(self) -> None:
        try:
            if self.work is not None:
                self.work.wait()
        except RuntimeError as error:
            raise CollectiveFailed(f"a collective of axis {self.axis} broke off; has another rank ended?") from error
        if self.then is not None:
            self.then()


@dataclass
class Axis:
    """This rank's place among the `size` ranks that share everything but one coordinate."""

    name: str
    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    bytes_sent: int = 0
    control_bytes_sent: int = 0
    """Bytes of scalars for reports and decisions, apart from those of the work itself."""

    def all_reduce(self, x: Tensor, operation: Operation = "sum", dtype: torch.dtype | None = None) -> Pending:
        """Start reducing `x` in place over the axis; with `dtype` the sum runs in it and is rounded once."""
        if self.size == 1:
            return Pending(self.name)
        wire = x if dtype in (None, x.dtype) else x.to(dtype)
        self.bytes_sent += ring_all_reduce_bytes(wire.nbytes, self.size)
        work = dist.all_reduce(wire, OPERATIONS[operation], group=self.group, async_op=True)
        return Pending(self.name, work, None if wire is x else lambda: x.copy_(wire))

    def sum(self, *values: float) -> list[float]:
        """The sums over the axis of a few numbers, for reports and decisions."""
        return self._control(values, "sum")

    def max(self, *values: float) -> list[float]:
        return self._control(values, "max")

    def gather(self, value: float) -> list[float]:
        """Every rank's number, by rank: a sum in which each rank fills its own place."""
        return self.sum(*(value if rank == self.rank else 0.0 for rank in range(self.size)))

    def barrier(self) -> None:
        self.sum(0.0)

    def _control(self, values: tuple[float, ...], operation: Operation) -> list[float]:
        if self.size == 1:
            return list(values)
        x = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.control_bytes_sent += ring_all_reduce_bytes(x.nbytes, self.size)
        Pending(self.name, dist.all_reduce(x, OPERATIONS[operation], group=self.group, async_op=True)).wait()
        return x.tolist()


def ring_all_reduce_bytes(num_bytes: int, size: int) -> int:
    return 2 * num_bytes * (size - 1) // size


@dataclass
class Mesh:
    """This rank's axes. `data` is dp x cp; a unit of state is cut over `shard` and repeated over `replicate`."""

    layout: Layout
    rank: int
    device: torch.device
    axes: dict[AxisName, Axis] = field(repr=False)

    @property
    def coord(self) -> Coord:
        return self.layout.coord(self.rank)

    @property
    def data(self) -> Axis:
        return self.axes["data"]

    @property
    def shard(self) -> Axis:
        return self.axes["shard"]

    @property
    def replicate(self) -> Axis:
        return self.axes["replicate"]

    @property
    def pp(self) -> Axis:
        return self.axes["pp"]

    @property
    def world(self) -> Axis:
        return self.axes["world"]

    def bytes_sent(self) -> dict[str, int]:
        """Bytes this rank has sent since the last call, by the axis that caused them."""
        sent = {name: 0 for name in ("dp", "tp", "pp", "cp", "control")}
        for name, axis in self.axes.items():
            sent[name if name in sent else "dp"] += axis.bytes_sent
            sent["control"] += axis.control_bytes_sent
            axis.bytes_sent = axis.control_bytes_sent = 0
        return sent


def make_mesh(layout: Layout, rank: int, device: torch.device) -> Mesh:
    """Build the axes of `rank`. Every rank of the process group must call it, since groups are made together."""
    names: tuple[AxisName, ...] = ("dp", "tp", "pp", "cp", "data", "shard", "replicate", "world")
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    axes = {}
    for name in names:
        members = [layout.ranks(name, layout.coord(other)) for other in range(layout.world_size)]
        for ranks in sorted(set(members)):
            if len(ranks) > 1 and ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks))
        mine = members[rank]
        axes[name] = Axis(name, mine.index(rank), len(mine), device, groups.get(mine))
    return Mesh(layout, rank, device, axes)
