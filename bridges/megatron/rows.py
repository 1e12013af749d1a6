"""Which rows of Megatron's [S, B, D] are tokens, and the packed batch that they make.

A layer's Program takes packed rows: whole sequences one after the other, padded to a bucket. Where each sequence lies
comes from cu_seqlens (packed, thd) or from a mask (a right-padded micro-batch). Padding is never computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from isojax import batch as batches
from isojax.errors import InputError
from isojax.model import rope
from isojax.model.config import DenseConfig
from isojax.model.dense import Batch

KEPT = 16  # micro-batches whose rows are kept: as many as a pipeline has in flight; a miss only costs time


@dataclass(frozen=True)
class Rows:
    """N tokens of an [S, B, D] tensor as T >= N packed rows.

    index [N] int64: flat row s * B + b of each token. lens: tokens of each sequence, in packed order.
    batch: isojax Batch of torch tensors, T rows. whole: the N tokens are the tensor's own rows, all of them, in order;
    then nothing is gathered, and nothing at all is copied where T = N.
    """

    shape: tuple[int, int]
    index: torch.Tensor
    lens: tuple[int, ...]
    batch: Batch
    padded: int
    whole: bool

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[S, B, ...] -> [T, ...]; padding rows are zeros. Differentiable; only bytes move."""
        return _Pack.apply(self, x)

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [S, B, ...]; places without a token are zeros. Differentiable; only bytes move."""
        return _Unpack.apply(self, rows)

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        flat, n = x.reshape(-1, *x.shape[2:]), len(self.index)
        if self.whole and n == self.padded:
            return flat
        out = x.new_empty(self.padded, *x.shape[2:])
        out[n:].zero_()
        if self.whole:
            out[:n].copy_(flat)
        else:
            torch.index_select(flat, 0, self.index, out=out[:n])
        return out

    def _unpack(self, rows: torch.Tensor) -> torch.Tensor:
        if self.whole:
            return rows[: len(self.index)].reshape(*self.shape, *rows.shape[1:])
        out = rows.new_zeros(self.shape[0] * self.shape[1], *rows.shape[1:])
        out.index_copy_(0, self.index, rows[: len(self.index)])
        return out.reshape(*self.shape, *rows.shape[1:])


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Rows, x: torch.Tensor) -> torch.Tensor:
        ctx.rows = rows
        return rows._pack(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        return None, ctx.rows._unpack(grad)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Rows, x: torch.Tensor) -> torch.Tensor:
        ctx.rows = rows
        return rows._unpack(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        return None, ctx.rows._pack(grad)


class RowFinder:
    """Makes Rows, once per micro-batch: all layers, and their recomputation, share them.

    Entries are found by the identity and version of what they were made from, and keep it alive, so that its memory
    cannot come to mean something else.
    """

    def __init__(self, config: DenseConfig, arch: str, rope: bool = True):
        self.config, self.arch, self.with_rope = config, arch, rope
        self._kept: OrderedDict[Any, tuple[Any, Rows]] = OrderedDict()
        self._rope: dict[torch.device, torch.Tensor] = {}

    def find(
        self,
        shape: tuple[int, ...],
        device: torch.device,
        attention_mask: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Rows:
        """Rows of a micro-batch of `shape` (S, B).

        attention_mask: [B, S], nonzero at tokens (Hugging Face's), or [B or 1, 1, S, S], True where a key is hidden
        (Megatron's). padding_mask: [B, S], True at padding (Megatron's). packed_seq_params: Megatron's, thd.
        Without any of them every place is a token.

        Raises: InputError for left padding, holes, a mask that is not causal, sequences longer than the model's
        positions, or cu_seqlens that do not fit the tensor.
        """
        sources = (attention_mask, padding_mask, *_packed_tensors(packed_seq_params))
        key = (shape, device, *map(_identity, sources))
        if None not in key and key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][1]
        rows = self._make(shape, device, attention_mask, padding_mask, packed_seq_params)
        if None not in key:
            self._kept[key] = (sources, rows)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return rows

    def _make(self, shape: tuple[int, ...], device: torch.device, attention: Any, padding: Any, packed: Any) -> Rows:
        s, b = shape
        if packed is not None:
            starts, lens = _packed_sequences(packed, shape)
            index = np.concatenate([np.arange(n) + start for start, n in zip(starts, lens, strict=True)])
        else:
            lens = _lengths(attention, padding, s, b)
            index = np.concatenate([np.arange(n) * b + i for i, n in enumerate(lens)])
        if max(lens) > self.config.positions:
            raise InputError(
                f"sequence {int(np.argmax(lens))} has {max(lens)} tokens; the model has {self.config.positions} "
                "positions; shorten it"
            )
        made = batches.packed(lens, self.config.group, self.arch, None, rows_for(sum(lens), self.arch))
        there = lambda x: torch.from_numpy(np.ascontiguousarray(x)).to(device)
        batch = Batch(
            there(made.positions),
            there(made.cu_q),
            there(made.lens),
            there(made.work),
            self.rope_table(device) if self.with_rope else None,
            tile=made.tile,
        )
        padded = len(made.positions)
        whole = len(index) == s * b and np.array_equal(index, np.arange(len(index)))
        return Rows((s, b), there(index.astype(np.int64)), tuple(map(int, lens)), batch, padded, whole)

    def rope_table(self, device: torch.device) -> torch.Tensor:
        """The model's rotary table [P, D] float32 on a device, made once."""
        if device not in self._rope:
            table = rope.table(self.config.rope, self.config.head_dim, self.config.positions)
            self._rope[device] = torch.from_numpy(table).to(device)
        return self._rope[device]


def rows_for(tokens: int, arch: str) -> int:
    """Rows that `tokens` are padded to: an eighth of the power of two below at most, since a trainer computes them all.

    Below 1,024 rows finer than an engine's buckets, which are captured as graphs: here a new count costs a compilation,
    once.
    """
    quantum = batches.ROW_QUANTUM[arch]
    step = max(quantum, 1 << max(0, (tokens - 1).bit_length() - 4))
    return max(1, -(-tokens // step)) * step


def _identity(x: Any) -> Any:
    """What tells one tensor's content from another's while both live; None where nothing does."""
    if x is None:
        return ()
    if x.is_inference():
        return None  # such tensors do not count their versions
    return x.data_ptr(), x._version, tuple(x.shape), x.stride(), x.dtype


def _packed_tensors(packed: Any) -> tuple[Any, ...]:
    return () if packed is None else (packed.cu_seqlens_q, packed.cu_seqlens_q_padded)


def _packed_sequences(packed: Any, shape: tuple[int, ...]) -> tuple[Sequence[int], Sequence[int]]:
    """(first row, tokens) of each packed sequence."""
    if packed.qkv_format != "thd" or packed.cu_seqlens_q is None or shape[1] != 1:
        raise InputError(
            f"PackedSeqParams with qkv_format {packed.qkv_format!r} over a tensor of batch {shape[1]}; "
            "give qkv_format 'thd', cu_seqlens_q, and one row of tokens"
        )
    kv = packed.cu_seqlens_kv
    if kv is not None and kv is not packed.cu_seqlens_q and not torch.equal(kv, packed.cu_seqlens_q):
        raise InputError("cu_seqlens_kv differs from cu_seqlens_q; in training a sequence's keys are its own")
    cu = packed.cu_seqlens_q.tolist()
    slots = cu if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded.tolist()
    lens = np.diff(cu)
    if cu[0] != 0 or (lens < 0).any() or len(slots) != len(cu) or (np.diff(slots) < lens).any() or slots[-1] > shape[0]:
        raise InputError(f"cu_seqlens {cu} (slots {slots}) do not cut {shape[0]} rows into sequences; make them ascend")
    return slots[:-1], lens.tolist()


def _lengths(attention: torch.Tensor | None, padding: torch.Tensor | None, s: int, b: int) -> list[int]:
    found: list[list[int]] = []
    if attention is not None:
        found.append(_from_attention(attention, s, b))
    if padding is not None:
        if tuple(padding.shape) != (b, s):
            raise InputError(f"padding_mask has shape {tuple(padding.shape)}; it should be [{b}, {s}], True at padding")
        found.append(_prefixes(~padding.bool()))
    if len(found) == 2 and found[0] != found[1]:
        raise InputError(f"attention_mask says lengths {found[0]}, padding_mask {found[1]}; give one of them")
    return found[0] if found else [s] * b


def _from_attention(mask: torch.Tensor, s: int, b: int) -> list[int]:
    if tuple(mask.shape) == (b, s):
        return _prefixes(mask != 0)
    if mask.dim() != 4 or mask.shape[0] not in (1, b) or mask.shape[1] != 1 or tuple(mask.shape[2:]) != (s, s):
        raise InputError(
            f"attention_mask has shape {tuple(mask.shape)}; supported are [{b}, {s}] (nonzero at tokens), "
            f"[{b} or 1, 1, {s}, {s}] (True where hidden), or None"
        )
    seen = ~mask[:, 0].bool()  # [B, query, key]
    lens = _prefixes(seen.any(1))
    causal = torch.ones(s, s, dtype=torch.bool, device=mask.device).tril()
    real = torch.arange(s, device=mask.device) < torch.tensor(lens, device=mask.device)[:, None]
    if bool(((seen != causal) & real[:, :, None] & real[:, None, :]).any()):
        raise InputError("attention_mask is not causal within its sequences; only causal attention is supported")
    return lens if len(lens) == b else lens * b


def _prefixes(real: torch.Tensor) -> list[int]:
    """Lengths of the rows of [B, S], True at tokens. Raises InputError unless each is a prefix."""
    lens = real.sum(1)
    good = (real == (torch.arange(real.shape[1], device=real.device) < lens[:, None])).all(1)
    if not bool(good.all()):
        i = int((~good).nonzero()[0])
        first = int(real[i].nonzero()[0])
        kind = f"is left-padded: its first token is at column {first}" if first else "has padding between its tokens"
        raise InputError(f"sequence {i} {kind}; positions start at column 0: pad right, or pack (PackedSeqParams)")
    return lens.tolist()
