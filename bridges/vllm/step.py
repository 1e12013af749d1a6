"""The arrays of one engine step, in buffers that never move: a CUDA graph reads their next contents when it replays.

A bucket of T rows uses the first T rows of each buffer and the first `requests(T)` requests, so T alone decides every
shape and one compiled Program (or captured graph) serves decode, prefill and mixed steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from isojax import batch as batches
from isojax.pallas_kernels.attn import work


class Arrays(NamedTuple):
    """What isojax.model.Batch holds, as torch int32 tensors, without the rope table; see there."""

    tokens: torch.Tensor
    positions: torch.Tensor
    cu_q: torch.Tensor
    lens: torch.Tensor
    work: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor


class Step:
    """Buffers for at most `rows` rows in `seqs` requests of `blocks` cache blocks each."""

    def __init__(self, arch: str, group: int, rows: int, seqs: int, blocks: int, device: torch.device):
        self.arch, self.seqs, self.device = arch, seqs, device
        self.tile = work.tile_rows(arch, group)
        t = batches.bucket(rows, arch)
        r = self.requests(t)
        # the capacity of a work list grows with T and with the requests, which never fall as T grows
        shapes = [(t,), (t,), (r + 1,), (r,), (work.capacity(t, r, self.tile), 2), (r, blocks), (t,)]
        self._whole = Arrays(*(torch.zeros(s, dtype=torch.int32, device=device) for s in shapes))
        self._views: dict[int, Arrays] = {}

    def requests(self, rows: int) -> int:
        """Requests that a bucket of `rows` rows has room for."""
        return batches.request_bucket(min(rows, self.seqs))

    def arrays(self, rows: int) -> Arrays:
        """The views of the bucket that holds `rows` rows: the same tensor objects each time."""
        t = batches.bucket(rows, self.arch)
        if t not in self._views:
            r = self.requests(t)
            whole, capacity = self._whole, work.capacity(t, r, self.tile)
            lengths = (t, t, r + 1, r, capacity, r, t)
            self._views[t] = Arrays(*(x[:n] for x, n in zip(whole, lengths, strict=True)))
        return self._views[t]

    def fill(self, common: Any) -> Arrays:
        """Take over vLLM's CommonAttentionMetadata. Nothing here waits for the GPU.

        Rows past the last request write into block 0, which is nobody's, and belong to no attention tile.
        """
        n, r = common.num_actual_tokens, common.num_reqs
        a = self.arrays(n)
        a.positions[:n].copy_(common.positions[:n], non_blocking=True)
        a.positions[n:].zero_()
        a.slots[:n].copy_(common.slot_mapping[:n], non_blocking=True)
        a.slots[:n].clamp_(min=0)  # vLLM marks padding rows with -1
        a.slots[n:].zero_()
        width = min(a.table.shape[1], common.block_table_tensor.shape[1])
        a.table[:r, :width].copy_(common.block_table_tensor[:r, :width], non_blocking=True)
        starts = np.asarray(common.query_start_loc_cpu[: r + 1])
        query = np.diff(starts)
        # exact without speculative decoding; vLLM's dummy batches, though, may have more new tokens than tokens
        lens = np.maximum(np.asarray(common.seq_lens_cpu_upper_bound[:r]), query)
        self._send(a.cu_q, batches.pad(starts.astype(np.int32), len(a.cu_q), starts[-1]))
        self._send(a.lens, batches.pad(lens.astype(np.int32), len(a.lens)))
        self._send(a.work, work.work_list(query, self.tile, len(a.work)))
        return a

    def idle(self, rows: int) -> Arrays:
        """A bucket without any request: what a profiling run computes before there is a cache."""
        a = self.arrays(rows)
        for x in a:
            x.zero_()
        a.work[:, 0] = -1
        return a

    def _send(self, to: torch.Tensor, host: np.ndarray) -> None:
        source = torch.from_numpy(host)
        if self.device.type == "cuda":
            source = source.pin_memory()  # torch keeps the pages until the copy has run
        to.copy_(source, non_blocking=True)
