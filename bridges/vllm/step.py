"""The arrays of one engine step, in buffers that never move: a CUDA graph reads their next contents when it replays.

A bucket of T rows uses the first T rows of each buffer and the first `requests(T)` requests, so T alone decides every
shape. A step with one row in every request may run the decode kernels of attn.core (`Arrays.tile` 1), any step the
many-row ones. Where every request has one row both kinds read the same work list, so the buffers fit either graph.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch

from isojax import batch as batches
from isojax.pallas_kernels.attn import work

HALF = 4  # host copies of the control words in half of their ring: more than the steps that vLLM runs ahead of the GPU
ALIGN = 4  # int32 words: a kernel's operand starts at a multiple of 16 bytes


class Arrays(NamedTuple):
    """What isojax.model.Batch holds, as torch int32 tensors, without the rope table; see there."""

    tokens: torch.Tensor
    positions: torch.Tensor
    cu_q: torch.Tensor
    lens: torch.Tensor
    work: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    tile: int


class Step:
    """Buffers for at most `rows` rows in `seqs` requests of `blocks` cache blocks each.

    Attributes: `decode` says which kind of step to prepare while a graph is captured; None reads it off the metadata.
    `no_slot` is a constant. All else is written anew in each step, or never read.
    """

    def __init__(self, arch: str, group: int, rows: int, seqs: int, blocks: int, device: torch.device):
        self.arch, self.seqs, self.device = arch, seqs, device
        self.tile, self.decode_tile = work.tile_rows(arch, group), work.tile_rows(arch, group, longest=1)
        self.decode: bool | None = None
        t = batches.bucket(rows, arch)
        r = self.requests(t)
        new = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=device)
        # the capacity of a work list grows with T and with the requests, which never fall as T grows
        items = max(work.capacity(t, r, self.tile), batches.bucket(min(rows, seqs), arch))
        # what the host computes lies in one buffer, so that one copy brings it
        self._control = _Control((r + 1, r, 2 * items), device)
        cu_q, lens, flat = self._control.views
        self._whole = Arrays(new(t), new(t), cu_q, lens, flat.view(items, 2), new(r, blocks), new(t), self.tile)
        self.no_slot = torch.zeros((), dtype=torch.int64, device=device)  # what stands for vLLM's -1
        self._views: dict[tuple[int, int], Arrays] = {}
        self._ones: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # of `_one_row_each`

    def requests(self, rows: int) -> int:
        """Requests that a bucket of `rows` rows has room for."""
        return batches.request_bucket(min(rows, self.seqs))

    def arrays(self, rows: int, decode: bool = False) -> Arrays:
        """The views of the bucket that holds `rows` rows: the same tensor objects each time."""
        t, tile = batches.bucket(rows, self.arch), self.decode_tile if decode else self.tile
        if (t, tile) not in self._views:
            r, whole = self.requests(t), self._whole[:-1]
            lengths = (t, t, r + 1, r, work.capacity(t, r, tile), r, t)
            self._views[t, tile] = Arrays._make([*(x[:n] for x, n in zip(whole, lengths, strict=True)), tile])
        return self._views[t, tile]

    def fill(self, common: Any) -> Arrays:
        """The host's part of a step, from vLLM's CommonAttentionMetadata; `take` brings the rest. Does not wait."""
        n, r = common.num_actual_tokens, common.num_reqs
        a = self.arrays(n, common.max_query_len <= 1 if self.decode is None else self.decode)
        starts = np.asarray(common.query_start_loc_cpu[: r + 1])
        cu_q, lens, items = self._control.stage()
        live = int(starts[r])  # for a graph's sake vLLM adds requests without a row
        if common.max_query_len <= 1 and live <= r and starts[live] == live:  # the host's part of such a step shows
            cu_q[:], items[:], query = self._one_row_each(live)
        else:
            query = np.diff(starts)
            cu_q[: r + 1], cu_q[r + 1 :] = starts, live
            items[:] = work.work_list(query, self.tile, len(items) // 2).reshape(-1)
        # exact without speculative decoding; vLLM's dummy batches, though, may have more new tokens than tokens
        np.maximum(np.asarray(common.seq_lens_cpu_upper_bound[:r]), query[:r], out=lens[:r])
        lens[r:] = 0
        self._control.send()
        return a

    def take(self, a: Arrays, common: Any) -> None:
        """What vLLM has on the GPU, into the step's buffers: a part of the forward, so that a CUDA graph repeats it.

        As vLLM's own attention kernels in a graph do, it reads tensors that never move, in which rows past the last
        request have slot -1. Here they write into block 0, which is nobody's, and belong to no attention tile. A kernel
        that starts before the one before it has ended may read none of this until `await_previous`.
        """
        n, table = common.num_actual_tokens, common.block_table_tensor[: len(a.table), : a.table.shape[1]]
        a.positions[:n].copy_(common.positions[:n])
        torch.maximum(common.slot_mapping[:n], self.no_slot, out=a.slots[:n])
        if n < len(a.slots):
            a.positions[n:].zero_()
            a.slots[n:].zero_()
        a.table[: len(table), : table.shape[1]].copy_(table)

    def _one_row_each(self, live: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """cu_q, the work list, flat, and rows of each request, where the first `live` requests have one row each."""
        if live not in self._ones:
            seqs, items = len(self._whole.lens), len(self._whole.work)
            query = (np.arange(seqs) < live).astype(np.int32)
            listed = work.work_list(query, self.tile, items).reshape(-1)
            self._ones[live] = np.concatenate([[0], np.cumsum(query)]).astype(np.int32), listed, query
        return self._ones[live]

    def idle(self, rows: int) -> Arrays:
        """A bucket without any request: what a profiling run computes before there is a cache."""
        a = self.arrays(rows)
        for x in a[:-1]:
            x.zero_()
        a.work[:, 0] = -1
        return a


class _Control:
    """Int32 words in one device buffer that never moves, sent whole from a ring of pinned host buffers."""

    def __init__(self, sizes: tuple[int, ...], device: torch.device):
        starts = list(itertools.accumulate((-(-n // ALIGN) * ALIGN for n in sizes), initial=0))
        cut = lambda x: [x[a : a + n] for a, n in zip(starts, sizes, strict=False)]
        cuda = device.type == "cuda"
        self._device = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        self.views = cut(self._device)
        # device="cpu": vLLM builds its model under the GPU as torch's default device
        host = lambda: torch.zeros(starts[-1], dtype=torch.int32, device="cpu", pin_memory=cuda)
        self._hosts = [host() for _ in range(2 * HALF if cuda else 1)]
        self._parts = [cut(h.numpy()) for h in self._hosts]
        self._sent = [torch.cuda.Event(), torch.cuda.Event()] if cuda else []  # of each half of the ring
        self._at = 0  # the next one

    def stage(self) -> list[np.ndarray]:
        """The next host buffer's parts, to be overwritten: its last copy has run."""
        if self._sent and self._at % HALF == 0:
            self._sent[self._at // HALF].synchronize()  # recorded HALF steps ago, after the last copy out of this half
        return self._parts[self._at]

    def send(self) -> None:
        """On the stream that all steps run on."""
        self._device.copy_(self._hosts[self._at], non_blocking=True)
        if self._sent and self._at % HALF == HALF - 1:
            self._sent[self._at // HALF].record()
        self._at = (self._at + 1) % len(self._hosts)
