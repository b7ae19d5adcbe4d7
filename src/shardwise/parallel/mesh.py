"""The live twin of a `Layout`: one `Axis` per way the ranks are grouped, and every collective goes
through one.

An axis of one rank is the identity, so no caller asks whether it is cut. An axis counts the bytes
that this rank sends as a ring moves them: of S bytes among n ranks, 2S(n-1)/n for an all-reduce,
S(n-1)/n for its halves, reduce-scatter and all-gather, and for an all-to-all; S for one hop around
the ring.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.layout import AxisName, Coord, Layout, ring_bytes
from shardwise.parallel.spans import WAIT, Trace

Operation = Literal["sum", "max"]
OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
SLICE_ELEMENTS = 1 << 18
CPU = torch.device("cpu")
COUNTED_AS = {"tp": "tp", "kv_replica": "tp", "pp": "pp", "pp_down": "pp", "tied": "pp", "cp": "cp"}
"""Which axis of a layout causes the bytes of an axis; of all others dp does."""

# torch 2.13 renamed these and warns of the old names, which are all that 2.11 has
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveFailed(RuntimeError):
    """A collective broke off, most likely because another rank of its axis has ended."""


@dataclass
class Pending:
    """A collective under way. `wait` returns when its result is in place; it raises
    CollectiveFailed."""

    axis: "Axis"
    work: dist.Work | None = None
    then: Callable[[], object] | None = None
    """What is left to do on this rank once the work has arrived."""
    next: Callable[[], "Pending"] | None = None
    """Starts the second half of a collective that is made of two."""

    def advance(self) -> "Pending | None":
        """Wait for this half and start the next, if any; all ranks of an axis must do so in one
        order."""
        try:
            if self.work is not None:
                with self.axis.trace.span(f"{WAIT}{self.axis.name}"):
                    self.work.wait()
        except RuntimeError as error:
            raise CollectiveFailed(
                f"a collective of axis {self.axis.name} broke off; has another rank ended?"
            ) from error
        if self.then is not None:
            self.then()
        return None if self.next is None else self.next()

    def wait(self) -> None:
        pending: Pending | None = self
        while pending is not None:
            pending = pending.advance()


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
    trace: Trace = field(default_factory=lambda: Trace(CPU), repr=False)
    """Where it says when it waited; one for all axes of a mesh."""

    def all_reduce(
        self, x: Tensor, operation: Operation = "sum", dtype: torch.dtype | None = None
    ) -> Pending:
        """Start reducing `x` in place over the axis.

        With a `dtype` wider than that of x, the sum runs in it and is rounded once; it is done in
        its two halves, so x must be flat and divide among the ranks.
        """
        if self.size == 1:
            return Pending(self)
        if dtype not in (None, x.dtype):
            assert operation == "sum" and x.dim() == 1 and x.numel() % self.size == 0
            rows = x.view(self.size, -1)
            mine = rows[self.rank]
            return replace(
                self.reduce_scatter(rows, mine, dtype), next=lambda: self.all_gather(mine, x)
            )
        self.bytes_sent += ring_bytes(2 * x.nbytes, self.size)
        return Pending(
            self, dist.all_reduce(x, OPERATIONS[operation], group=self.group, async_op=True)
        )

    def reduce_scatter(
        self, x: Tensor, out: Tensor, dtype: torch.dtype | None = None, accumulate: bool = False
    ) -> Pending:
        """Start the sum over the axis of x [size, S], of which this rank takes its own row into
        `out` [S], or adds it to what is there.

        With a `dtype` wider than that of x, rows travel as they are and are added in it on arrival,
        in the order of the ranks, and rounded once: what a ring in that dtype would compute, for
        half the bytes. `out` may be this rank's row of x; the rest of x must stay as it is until
        the wait.
        """
        if self.size == 1:
            return Pending(self, then=lambda: add_rows(x, out, dtype or x.dtype, accumulate))
        self.bytes_sent += ring_bytes(x.nbytes, self.size)
        if dtype in (None, x.dtype) and x.device.type != "cpu" and not accumulate:
            return Pending(
                self, reduce_scatter_single(out, x.view(-1), group=self.group, async_op=True)
            )
        arrived = torch.empty_like(
            x
        )  # gloo has no reduce-scatter of its own: torch makes it of an all-reduce
        work = dist.all_to_all_single(arrived.view(-1), x.view(-1), group=self.group, async_op=True)
        return Pending(self, work, lambda: add_rows(arrived, out, dtype or x.dtype, accumulate))

    def all_gather(self, part: Tensor, out: Tensor) -> Pending:
        """Start to collect every rank's `part` [S] into `out` [size S], by rank. `part` may lie in
        its place in it."""
        if self.size == 1:
            return Pending(self, then=lambda: out.copy_(part))
        self.bytes_sent += ring_bytes(out.nbytes, self.size)
        return Pending(self, all_gather_single(out, part, group=self.group, async_op=True))

    def all_to_all(self, x: Tensor, out: Tensor) -> Pending:
        """Start to send row i of x [size, ...] to rank i, and to take into row i of `out` what rank
        i has for this one."""
        if self.size == 1:
            return Pending(self, then=lambda: out.copy_(x))
        self.bytes_sent += ring_bytes(x.nbytes, self.size)
        work = dist.all_to_all_single(out.view(-1), x.view(-1), group=self.group, async_op=True)
        return Pending(self, work)

    def send(self, x: Tensor, to: int) -> Pending:
        """Start to send x to rank `to`, counted around the axis; x must stay as it is until the
        wait."""
        self.bytes_sent += x.nbytes
        return self._move(dist.isend, x, to)

    def receive(self, out: Tensor, source: int) -> Pending:
        """Start to take into `out` what rank `source`, counted around the axis, sends; what one
        rank sends another arrives in the order in which it was sent."""
        return self._move(dist.irecv, out, source)

    def _move(self, end: Callable[..., object], x: Tensor, peer: int) -> Pending:
        move = dist.P2POp(end, x, group=self.group, group_peer=peer % self.size)
        return one_after_another(self, dist.batch_isend_irecv([move]))

    def pass_on(self, x: Tensor, out: Tensor) -> Pending:
        """Start to send x to the next rank around the ring, and to take into `out` what the one
        before sends. All ranks must start theirs in one order; x must stay as it is until the
        wait."""
        assert self.size > 1 and x.is_contiguous() and out.is_contiguous()
        self.bytes_sent += x.nbytes
        ends = ((dist.isend, x, self.rank + 1), (dist.irecv, out, self.rank - 1))
        moves = [
            dist.P2POp(end, each, group=self.group, group_peer=peer % self.size)
            for end, each, peer in ends
        ]
        return one_after_another(self, dist.batch_isend_irecv(moves))

    def broadcast(self, payload: bytes | None) -> bytes:
        """The bytes that the first rank of the axis gives, on all of its ranks; the others give
        None."""
        if self.size == 1:
            assert payload is not None
            return payload
        length = int(self.max(0 if payload is None else len(payload))[0])
        x = torch.zeros(length, dtype=torch.uint8, device=self.device)
        if payload is not None:
            x.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self.control_bytes_sent += x.nbytes * (payload is not None)
        Pending(self, dist.broadcast(x, group=self.group, group_src=0, async_op=True)).wait()
        return x.cpu().numpy().tobytes()

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
        self.control_bytes_sent += ring_bytes(2 * x.nbytes, self.size)
        Pending(
            self, dist.all_reduce(x, OPERATIONS[operation], group=self.group, async_op=True)
        ).wait()
        return x.tolist()


def one_after_another(axis: Axis, works: Sequence[dist.Work]) -> Pending:
    """All of what is under way already."""
    first, *others = works
    return Pending(axis, first, next=partial(one_after_another, axis, others) if others else None)


def add_rows(rows: Tensor, out: Tensor, dtype: torch.dtype, accumulate: bool) -> None:
    """out [S] = or += the sum of rows [n, S] in `dtype`, in slices that stay in the cache; `out`
    may be a row."""
    for part in range(0, out.numel(), SLICE_ELEMENTS):
        first, *others = rows[:, part : part + SLICE_ELEMENTS]
        total = first.to(dtype, copy=True)
        for row in others:
            total += row
        wanted = out[part : part + SLICE_ELEMENTS]
        wanted.copy_(total.add_(wanted) if accumulate else total)


@dataclass
class Mesh:
    """This rank's axes. `data` is dp x cp; a unit of state is cut over `shard` and repeated over
    `replicate`."""

    layout: Layout
    rank: int
    device: torch.device
    axes: dict[AxisName, Axis] = field(repr=False)
    trace: Trace = field(default_factory=lambda: Trace(CPU), repr=False)

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
    def dp(self) -> Axis:
        return self.axes["dp"]

    @property
    def tp(self) -> Axis:
        return self.axes["tp"]

    @property
    def pp(self) -> Axis:
        return self.axes["pp"]

    @property
    def cp(self) -> Axis:
        return self.axes["cp"]

    @property
    def pp_down(self) -> Axis:
        """The way back along `pp`: the two ends of a pair order what goes up and what goes down
        differently, so each has a channel of its own."""
        return self.axes["pp_down"]

    @property
    def tied(self) -> Axis:
        """The first and the last stage, which both hold a tied embedding."""
        return self.axes["tied"]

    @property
    def world(self) -> Axis:
        return self.axes["world"]

    def bytes_sent(self) -> dict[str, int]:
        """Bytes this rank has sent since the last call, by the axis that caused them."""
        sent = {name: 0 for name in ("dp", "tp", "pp", "cp", "control")}
        for name, axis in self.axes.items():
            sent[COUNTED_AS.get(name, "dp")] += axis.bytes_sent
            sent["control"] += axis.control_bytes_sent
            axis.bytes_sent = axis.control_bytes_sent = 0
        return sent


def make_mesh(
    layout: Layout, rank: int, device: torch.device, num_kv_heads: int | None = None
) -> Mesh:
    """Build the axes of `rank`. Every rank of the process group must call it, since groups are made
    together."""
    names: tuple[AxisName, ...] = (
        "dp",
        "tp",
        "pp",
        "pp_down",
        "cp",
        "data",
        "shard",
        "replicate",
        "world",
        "kv_replica",
        "tied",
    )
    groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
    axes = {}
    trace = Trace(device)
    for name in names:
        apart = (
            name if name in ("cp", "pp", "pp_down") else ""
        )  # hops do not queue behind sums of gradients
        members = [
            layout.ranks(name, layout.coord(other), num_kv_heads)
            for other in range(layout.world_size)
        ]
        for ranks in sorted(set(members)):
            if len(ranks) > 1 and (apart, ranks) not in groups:
                groups[apart, ranks] = dist.new_group(list(ranks))
        mine = members[rank]
        axes[name] = Axis(
            name, mine.index(rank), len(mine), device, groups.get((apart, mine)), trace=trace
        )
    return Mesh(layout, rank, device, axes, trace)


def control_axis(axis: Axis, name: str, timeout_s: float) -> Axis:
    """Return an axis of the same ranks for control messages on CPUs, whose collectives fail after
    `timeout_s`. `axis` must span all ranks, and all must call it.
    """
    timeout = timedelta(seconds=timeout_s)
    group = dist.new_group(backend="gloo", timeout=timeout) if axis.size > 1 else None
    return Axis(name, axis.rank, axis.size, CPU, group)
