"""The axes of a layout as process groups: one `Axis` per way in which ranks are grouped. Every
collective goes through an axis.

An axis of one rank is the identity, so callers need no special case. An axis counts the bytes that
this rank sends, as a ring moves them: for S bytes among n ranks, 2S(n-1)/n for an all-reduce,
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
SUM_ELEMENTS = 1 << 18
"""Elements that are summed at a time, so that they stay in the cache."""
CPU = torch.device("cpu")
COUNTED_AS = {"tp": "tp", "kv_replica": "tp", "pp": "pp", "pp_down": "pp", "tied": "pp", "cp": "cp"}
"""The axis of the layout under which the bytes of an axis are reported; `dp` for all others."""

# torch 2.13 renamed these and warns about the old names, the only ones in 2.11
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveFailed(RuntimeError):
    """A collective failed, most likely because another rank of its axis has ended."""


@dataclass
class Pending:
    """A collective in progress. `wait` returns when its result is in place, or raises
    CollectiveFailed.

    Attributes:
        axis: the axis that it runs on.
        work: what torch runs, or None if nothing is sent.
        then: the local work after that, such as a sum of received rows.
        next: starts the second half of a collective that consists of two.
    """

    axis: "Axis"
    work: dist.Work | None = None
    then: Callable[[], object] | None = None
    next: Callable[[], "Pending"] | None = None

    def advance(self) -> "Pending | None":
        """Wait for this half and start the next, if there is one, and return it. All ranks of an
        axis must do so in the same order."""
        try:
            if self.work is not None:
                with self.axis.trace.span(f"{WAIT}{self.axis.name}"):
                    self.work.wait()
        except RuntimeError as error:
            raise CollectiveFailed(
                f"a collective of axis {self.axis.name} failed; has another rank ended?"
            ) from error
        if self.then is not None:
            self.then()
        return None if self.next is None else self.next()

    def wait(self) -> None:
        """Wait until the result is in place."""
        pending: Pending | None = self
        while pending is not None:
            pending = pending.advance()


@dataclass
class Axis:
    """A group of ranks that differ in one coordinate, and this rank's position in it.

    Attributes:
        name: its name in the layout.
        rank: the position of this rank.
        size: the number of ranks.
        device: where its tensors are.
        group: the process group, None if the axis has one rank.
        bytes_sent: bytes that this rank has sent.
        control_bytes_sent: bytes of scalars for reports and decisions, counted apart.
        trace: where waits are recorded; one for all axes of a mesh.
    """

    name: str
    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    bytes_sent: int = 0
    control_bytes_sent: int = 0
    trace: Trace = field(default_factory=lambda: Trace(CPU), repr=False)

    def all_reduce(
        self, x: Tensor, operation: Operation = "sum", dtype: torch.dtype | None = None
    ) -> Pending:
        """Start to reduce `x` in place over the axis.

        With a `dtype` wider than that of x, the sum is computed in it and rounded once. It then
        runs in two halves, so x must be flat and divide evenly among the ranks.
        """
        if self.size == 1:
            return Pending(self)
        if dtype not in (None, x.dtype):
            assert operation == "sum" and x.dim() == 1 and x.numel() % self.size == 0
            rows = x.view(self.size, -1)
            local = rows[self.rank]
            first_half = self.reduce_scatter(rows, local, dtype)
            return replace(first_half, next=lambda: self.all_gather(local, x))
        self.bytes_sent += ring_bytes(2 * x.nbytes, self.size)
        work = dist.all_reduce(x, OPERATIONS[operation], group=self.group, async_op=True)
        return Pending(self, work)

    def reduce_scatter(
        self, x: Tensor, out: Tensor, dtype: torch.dtype | None = None, accumulate: bool = False
    ) -> Pending:
        """Start to sum x [size, S] over the axis. This rank's row of the sum goes to `out` [S], or
        is added to it with `accumulate`.

        With a `dtype` wider than that of x, rows are sent as they are, summed in `dtype` when they
        arrive, in the order of ranks, and rounded once: the result of a ring in that dtype, with
        half the bytes. `out` may be this rank's row of x; x must not change before the wait.
        """
        if self.size == 1:
            return Pending(self, then=lambda: add_rows(x, out, dtype or x.dtype, accumulate))
        self.bytes_sent += ring_bytes(x.nbytes, self.size)
        if dtype in (None, x.dtype) and x.device.type != "cpu" and not accumulate:
            return Pending(
                self, reduce_scatter_single(out, x.view(-1), group=self.group, async_op=True)
            )
        # gloo has no reduce-scatter of its own: torch builds it from an all-reduce
        arrived = torch.empty_like(x)
        work = dist.all_to_all_single(arrived.view(-1), x.view(-1), group=self.group, async_op=True)
        return Pending(self, work, lambda: add_rows(arrived, out, dtype or x.dtype, accumulate))

    def all_gather(self, part: Tensor, out: Tensor) -> Pending:
        """Start to gather `part` [S] of every rank into `out` [size * S], in the order of ranks.
        `part` may be a view of its place in `out`."""
        if self.size == 1:
            return Pending(self, then=lambda: out.copy_(part))
        self.bytes_sent += ring_bytes(out.nbytes, self.size)
        return Pending(self, all_gather_single(out, part, group=self.group, async_op=True))

    def all_to_all(self, x: Tensor, out: Tensor) -> Pending:
        """Start to send row i of x [size, ...] to rank i, and to receive row i of `out` from rank
        i."""
        if self.size == 1:
            return Pending(self, then=lambda: out.copy_(x))
        self.bytes_sent += ring_bytes(x.nbytes, self.size)
        work = dist.all_to_all_single(out.view(-1), x.view(-1), group=self.group, async_op=True)
        return Pending(self, work)

    def send(self, x: Tensor, to: int) -> Pending:
        """Start to send x to rank `to` of the axis, modulo its size. x must not change before the
        wait."""
        self.bytes_sent += x.nbytes
        return self._move(dist.isend, x, to)

    def receive(self, out: Tensor, source: int) -> Pending:
        """Start to receive `out` from rank `source` of the axis, modulo its size. Tensors from one
        rank arrive in the order in which they were sent."""
        return self._move(dist.irecv, out, source)

    def _move(self, end: Callable[..., object], x: Tensor, peer: int) -> Pending:
        move = dist.P2POp(end, x, group=self.group, group_peer=peer % self.size)
        return one_after_another(self, dist.batch_isend_irecv([move]))

    def pass_on(self, x: Tensor, out: Tensor) -> Pending:
        """Start to send x to the next rank around the ring, and to receive `out` from the previous
        one. All ranks must start such hops in the same order. x must not change before the wait."""
        assert self.size > 1 and x.is_contiguous() and out.is_contiguous()
        self.bytes_sent += x.nbytes
        ends = ((dist.isend, x, self.rank + 1), (dist.irecv, out, self.rank - 1))
        moves = [
            dist.P2POp(end, each, group=self.group, group_peer=peer % self.size)
            for end, each, peer in ends
        ]
        return one_after_another(self, dist.batch_isend_irecv(moves))

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return the payload of the first rank on all ranks of the axis; the others pass None."""
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
        """Return the sums of a few numbers over the axis, for reports and decisions."""
        return self._control(values, "sum")

    def max(self, *values: float) -> list[float]:
        """Return the maxima of a few numbers over the axis."""
        return self._control(values, "max")

    def gather(self, value: float) -> list[float]:
        """Return the number of every rank, in the order of ranks: a sum in which each rank fills
        its own place."""
        return self.sum(*(value if rank == self.rank else 0.0 for rank in range(self.size)))

    def barrier(self) -> None:
        """Wait until all ranks of the axis are here."""
        self.sum(0.0)

    def _control(self, values: tuple[float, ...], operation: Operation) -> list[float]:
        if self.size == 1:
            return list(values)
        x = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.control_bytes_sent += ring_bytes(2 * x.nbytes, self.size)
        work = dist.all_reduce(x, OPERATIONS[operation], group=self.group, async_op=True)
        Pending(self, work).wait()
        return x.tolist()


def one_after_another(axis: Axis, works: Sequence[dist.Work]) -> Pending:
    """Return a pending collective that waits for several, which have been started."""
    first, *others = works
    return Pending(axis, first, next=partial(one_after_another, axis, others) if others else None)


def add_rows(rows: Tensor, out: Tensor, dtype: torch.dtype, accumulate: bool) -> None:
    """Set `out` [S] to the sum of rows [n, S] in `dtype`, or add it with `accumulate`. `out` may be
    one of the rows."""
    for part in range(0, out.numel(), SUM_ELEMENTS):
        first, *others = rows[:, part : part + SUM_ELEMENTS]
        total = first.to(dtype, copy=True)
        for row in others:
            total += row
        result = out[part : part + SUM_ELEMENTS]
        result.copy_(total.add_(result) if accumulate else total)


@dataclass
class Mesh:
    """The axes of one rank, by name and as attributes.

    `data` is dp x cp. A unit of state is sharded over `shard` and replicated over `replicate`.
    `pp_down` is the way back along `pp`: both ends of a pair order what goes up and what goes down
    differently, so each direction has its own channel. `tied` are the first and the last stage,
    which both hold a tied embedding; `kv_replica` the tensor ranks that share a kv head.
    """

    layout: Layout
    rank: int
    device: torch.device
    axes: dict[AxisName, Axis] = field(repr=False)
    trace: Trace = field(default_factory=lambda: Trace(CPU), repr=False)
    dp: Axis = field(init=False, repr=False)
    tp: Axis = field(init=False, repr=False)
    pp: Axis = field(init=False, repr=False)
    pp_down: Axis = field(init=False, repr=False)
    cp: Axis = field(init=False, repr=False)
    data: Axis = field(init=False, repr=False)
    shard: Axis = field(init=False, repr=False)
    replicate: Axis = field(init=False, repr=False)
    world: Axis = field(init=False, repr=False)
    kv_replica: Axis = field(init=False, repr=False)
    tied: Axis = field(init=False, repr=False)

    def __post_init__(self) -> None:
        vars(self).update(self.axes)

    @property
    def coord(self) -> Coord:
        return self.layout.coord(self.rank)

    def bytes_sent(self) -> dict[str, int]:
        """Return the bytes that this rank has sent since the last call, by axis of the layout, and
        those of scalars as `control`."""
        sent = {name: 0 for name in ("dp", "tp", "pp", "cp", "control")}
        for name, axis in self.axes.items():
            sent[COUNTED_AS.get(name, "dp")] += axis.bytes_sent
            sent["control"] += axis.control_bytes_sent
            axis.bytes_sent = axis.control_bytes_sent = 0
        return sent


def make_mesh(
    layout: Layout, rank: int, device: torch.device, num_kv_heads: int | None = None
) -> Mesh:
    """Create the axes of `rank`. Every rank must call it, since process groups are created
    together. `num_kv_heads` is that of the model; None: every tensor rank has its own kv heads."""
    groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
    axes = {}
    trace = Trace(device)
    for name in layout.AXES:
        # hops have their own groups, so that they do not queue behind sums of gradients
        own_group = name if name in ("cp", "pp", "pp_down") else ""
        members = [
            layout.ranks(name, layout.coord(other), num_kv_heads)
            for other in range(layout.world_size)
        ]
        for ranks in sorted(set(members)):
            if len(ranks) > 1 and (own_group, ranks) not in groups:
                groups[own_group, ranks] = dist.new_group(list(ranks))
        ranks = members[rank]
        axes[name] = Axis(
            name, ranks.index(rank), len(ranks), device, groups.get((own_group, ranks)), trace=trace
        )
    return Mesh(layout, rank, device, axes, trace)


def control_axis(axis: Axis, name: str, timeout_s: float) -> Axis:
    """Return an axis of the same ranks for control messages on CPUs, whose collectives fail after
    `timeout_s`. `axis` must span all ranks, and all must call it.
    """
    timeout = timedelta(seconds=timeout_s)
    group = dist.new_group(backend="gloo", timeout=timeout) if axis.size > 1 else None
    return Axis(name, axis.rank, axis.size, CPU, group)
