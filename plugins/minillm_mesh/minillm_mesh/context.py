"""Context parallelism on torch: N neighbouring ranks share each row, each computing some of its columns.

A row of T columns is cut into 2 N chunks of c. Rank r of the neighbours has chunks r and 2 N - 1 - r:

    rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4        (N = 4)

A query of chunk j attends to j + 1/2 chunks of keys on average, so each rank computes c^2 (r + 1/2) +
c^2 (2 N - 1 - r + 1/2) = 2 N c^2 pairs: an even load. Contiguous columns would give the last rank (2 N - 1) / N
of the mean: 1.5 times for two ranks, 1.75 for four. The attention op takes queries that are the last T of S
columns, so it is called as in decoding, once per chunk: queries of chunk j, gathered keys and values of chunks
0 .. j. Alternatively an all-to-all exchanges heads for columns (exchange.py chooses), as in Ulysses.

Nodes that compute column by column need no change. Nodes that look back n columns are also called once per
chunk, with the n preceding columns prepended. Nodes that need more are refused by name before training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from minillm_core.inspection import COLUMNS, Scope, ahead
from minillm_mesh.collectives import all_gather_autograd, all_to_all_autograd

Batch = Mapping[str, np.ndarray]


class Columns:
    """The assignment of row columns to neighbouring ranks.

    Args:
        rank: of this process among its neighbours.
        size: N.
        group: the neighbours' process group.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        self.size, self.group = size, group
        self.chunks = rank, 2 * size - 1 - rank
        pairs = [(one, 2 * size - 1 - one) for one in range(size)]
        self.held = [chunk for pair in pairs for chunk in pair]  # by rank, then by place
        self.order = [self.held.index(chunk) for chunk in range(2 * size)]

    def of(self, length: int) -> np.ndarray:
        """Return this rank's columns of a row of ``length``: int32 (length / N,)."""
        chunk = length // (2 * self.size)
        return np.concatenate(
            [np.arange(one * chunk, (one + 1) * chunk, dtype=np.int32) for one in self.chunks]
        )

    def cut(self, batch: Batch, offsets: Sequence[int]) -> Batch:
        """Select this rank's columns of a batch, and shifted labels for further targets, (B, T / N) each.

        Args:
            batch: fields (B, T, ...).
            offsets: of further targets: their label is ``offset`` - 1 columns later.
        """
        labels = batch["labels"]
        rows, length = labels.shape
        mine, further = self.of(length), dict[str, np.ndarray]()
        for offset in offsets:
            moved = np.full_like(labels, -1)
            moved[:, : max(length + 1 - offset, 0)] = labels[:, offset - 1 :]
            further[ahead(offset)] = moved
        whole = {**batch, **further, COLUMNS: np.tile(np.arange(length, dtype=np.int32), (rows, 1))}
        return {name: np.ascontiguousarray(field[:, mine]) for name, field in whole.items()}

    def chunked(self, x: Tensor) -> list[Tensor]:
        """All-gather two chunks (2, ...) of every rank: 2 N arrays (...), in row order."""
        return self.ordered(all_gather_autograd(x, self.group))

    def row(self, x: Tensor) -> Tensor:
        """All-gather the columns (B, S / N, ...) of every rank: (B, S, ...), in row order."""
        return torch.cat(self.chunked(torch.stack(x.chunk(2, 1))), 1)

    def ordered(self, x: Tensor) -> list[Tensor]:
        """Reorder chunks (2 N, ...), two per rank, into row order."""
        # unbind's gradient is one stack; indexing would allocate a full-size gradient per index
        every = x.unbind(0)
        return [every[at] for at in self.order]

    def to_heads(self, x: Sequence[Tensor]) -> list[Tensor]:
        """Exchange columns of all heads (B, S / N, H, D) for all columns of this rank's, (B, S, H / N, D) each."""
        parts = [one.unflatten(2, (self.size, -1)) for one in x]  # (B, S / N, N, H / N, D)
        pair = torch.stack(torch.cat(parts, 3).chunk(2, 1))  # (2, B, c, N, heads, D)
        sent = pair.permute(3, 0, 1, 2, 4, 5)  # to each rank: its heads of this one's chunks
        whole = torch.cat(self.ordered(all_to_all_autograd(sent, self.group).flatten(0, 1)), 1)
        return list(whole.split([one.shape[3] for one in parts], 2))

    def to_columns(self, y: Tensor) -> Tensor:
        """Exchange all columns of this rank's heads (B, S, H / N, D) for its columns of all, (B, S / N, H, D)."""
        chunks = y.chunk(2 * self.size, 1)
        sent = torch.stack([chunks[at] for at in self.held]).unflatten(0, (self.size, 2))
        got = all_to_all_autograd(sent, self.group)  # (N, 2, B, c, H / N, D)
        return got.permute(2, 1, 3, 0, 4, 5).flatten(3, 4).flatten(1, 2)


class ContextScope(Scope):
    """A scope that holds one rank's columns of each row.

    Args:
        reads: arrays (B, T / N, ...), and schedule values.
        columns: this rank's columns.
        shape: (B, T / N).
    """

    def __init__(self, reads: dict[str, Any], columns: Columns, shape: tuple[int, int]) -> None:
        super().__init__(reads)
        self.ours, self.shape = columns, shape
        self.chunk = shape[1] // 2  # c

    def positions(self, ops: Any) -> Any:
        """Return the columns' positions in their rows, int32 (T / N,)."""
        row = ops.arange(2 * self.ours.size * self.chunk)
        return torch.cat([row[at * self.chunk : (at + 1) * self.chunk] for at in self.ours.chunks])

    def run_block(
        self, block: Any, x: Any, *, checkpointing: bool, turn: int = 0
    ) -> tuple[Any, ...]:
        """Run a block on a scope of the same columns; recomputation repeats its collectives."""
        scope_of = partial(type(self), columns=self.ours, shape=self.shape)
        run = partial(block, scope_of=scope_of)
        reads = [self.reads[name] for name in block.inputs]
        return block.framework.checkpoint(run, x, *reads) if checkpointing else run(x, *reads)

    def of_columns(self, value: Any) -> bool:
        """Return whether a value has one column per token: (B, T / N, ...)."""
        return tuple(getattr(value, "shape", ()))[:2] == self.shape

    def apply(self, node: Any, own: dict[str, Any], like: tuple[str, ...] = ()) -> Any:
        """Run ``node.forward``; with lookback once per chunk, with the preceding columns prepended."""
        if not node.lookback:
            return super().apply(node, own, like)
        names = self.reads | own
        given = [names[name] for name in node.bound]
        before = [self.before(v, node.lookback) if self.of_columns(v) else None for v in given]
        found = []
        for place, at in enumerate(self.ours.chunks):
            earlier = min(node.lookback, at * self.chunk)
            mine = slice(place * self.chunk, (place + 1) * self.chunk)
            behind = [
                value if tails is None else torch.cat([tails[place], value[:, mine]], 1)
                for value, tails in zip(given, before, strict=True)
            ]
            result = self.split_emitted(node, node(*behind))
            parts = result if isinstance(result, (tuple, list)) else (result,)
            found.append([part[:, earlier:] for part in parts])
        joined = tuple(torch.cat(each, 1) for each in zip(*found, strict=True))
        return joined if isinstance(result, (tuple, list)) else joined[0]

    def before(self, x: Tensor, count: int) -> list[Tensor]:
        """Fetch the ``count`` columns before each of this rank's two chunks of x (B, T / N, ...).

        Fewer at the row's start. Only the ends of chunks are sent, if these suffice.
        """
        tail = min(count, self.chunk)
        ends = torch.stack([one[:, -tail:] for one in x.split(self.chunk, 1)])
        chunks = self.ours.chunked(ends)  # (B, tail, ...) each
        needed, found = -(-count // tail), []
        for at in self.ours.chunks:
            row = torch.cat([x[:, :0], *chunks[max(0, at - needed) : at]], 1)
            found.append(row[:, max(0, row.shape[1] - count) :])
        return found

    def attend(self, attention: Any, call: Any, x: Any) -> Any:
        """Compute attention of this rank's chunks over the gathered keys and values of all columns up to them."""
        size = self.chunk * attention.stretch  # positions of a chunk
        k, v = self.ours.row(torch.stack([call.k, call.v], 2)).unbind(2)  # (B, S, K, D) each
        documents = None if call.documents is None else self.ours.row(call.documents)  # (B, S)
        window = None if attention.core is not None else call.window
        found, queries = [], call.q.split(size, 1)
        for place, at in enumerate(self.ours.chunks):
            end, first = (at + 1) * size, 0
            if isinstance(window, int):  # rounded to the blocks of 128 keys that kernels skip
                first = max(0, at * size - window + 1) // 128 * 128
            columns = slice(place * self.chunk, (place + 1) * self.chunk)
            reads = {n: r[:, columns] if self.of_columns(r) else r for n, r in self.reads.items()}
            part = call._replace(
                q=queries[place],
                k=k[:, first:end],
                v=v[:, first:end],
                documents=None if documents is None else documents[:, first:end],
            )
            found.append(attention.attended(part, x[:, columns], Scope(reads)))
        return torch.cat(found, 1)


class HeadsScope(ContextScope):
    """A scope whose attention runs over all columns of some heads (Ulysses, arXiv:2309.14509)."""

    def attend(self, attention: Any, call: Any, x: Any) -> Any:
        """Compute attention of this rank's heads over all columns, as in one process."""
        q, k, v = self.ours.to_heads([call.q, call.k, call.v])
        documents = None if call.documents is None else self.ours.row(call.documents)
        whole = call._replace(q=q, k=k, v=v, documents=documents)
        return self.ours.to_columns(attention.attended(whole, x, self))


__all__ = ["Columns", "ContextScope", "HeadsScope"]
