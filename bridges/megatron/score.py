"""Sequences of tokens to what a trainer says about them: batches made, run in a named case, and taken apart again."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from bridges.megatron import model as models
from bridges.megatron import start
from bridges.megatron.model import IsoGPTModel
from isojax.model import weights
from isojax.model.config import load_config

Tokens = Sequence[Sequence[int]]


def padded(
    sequences: Tokens, width: int | None = None, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, labels, attention mask), each [B, S] int64, right-padded with 0; a last token's label is 0."""
    width = width or max(map(len, sequences))
    out = np.zeros((3, len(sequences), width), np.int64)
    for i, s in enumerate(sequences):
        out[0, i, : len(s)] = s
        out[1, i, : len(s) - 1] = s[1:]
        out[2, i, : len(s)] = 1
    tokens, labels, mask = torch.from_numpy(out).to(device).unbind(0)
    return tokens, labels, mask


def packed(
    sequences: Tokens, slot: int = 1, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, PackedSeqParams]:
    """(tokens, labels, PackedSeqParams) of one thd row, [1, S]; each sequence starts at a multiple of `slot`."""
    lens = [len(s) for s in sequences]
    slots = [-(-n // slot) * slot for n in lens]
    starts, cu = ([0, *itertools.accumulate(x)] for x in (slots, lens))
    out = np.zeros((2, 1, starts[-1]), np.int64)
    for s, at in zip(sequences, starts, strict=False):
        out[0, 0, at : at + len(s)] = s
        out[1, 0, at : at + len(s) - 1] = s[1:]
    tokens, labels = torch.from_numpy(out).to(device).unbind(0)
    there = lambda x: torch.tensor(x, dtype=torch.int32, device=device)
    packing = PackedSeqParams("thd", there(cu), max_seqlen_q=max(lens), max_seqlen_kv=max(lens))
    packing.cu_seqlens_kv = packing.cu_seqlens_q
    if slot > 1:
        packing.cu_seqlens_q_padded = packing.cu_seqlens_kv_padded = there(starts)
    return tokens, labels, packing


@dataclass
class Scores:
    """What a trainer says about each sequence, on the host.

    logprobs: [len - 1] float32, of every token but the first. hidden: [len, D] of the final hidden states, bf16 as its
    int16 bits. seconds, peak_mib: of the run, compilation included at the first shapes (CUDA memory only).
    """

    logprobs: list[np.ndarray]
    hidden: list[np.ndarray]
    seconds: float
    peak_mib: float


def score(
    trainer: IsoGPTModel,
    sequences: Tokens,
    *,
    case: str,
    temperature: float = 1.0,
    micro_batch: int = 8,
    pack: bool = False,
    hidden: bool = False,
) -> Scores:
    """Run `sequences` in micro-batches, right-padded or packed.

    Raises: InputError for token ids, lengths or a case that the trainer refuses.
    """
    device = next(trainer.parameters()).device
    out, states = [], []
    start_time = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for i in range(0, len(sequences), micro_batch):
        part = sequences[i : i + micro_batch]
        if pack:
            tokens, labels, packing = packed(part, device=device)
            masks = {"packed_seq_params": packing}
        else:
            tokens, labels, mask = padded(part, device=device)
            masks = {"attention_mask": mask}
        found = trainer.logprobs(tokens, labels, case=case, temperature=temperature, **masks)
        out += [row[:-1].numpy() for row in _apart(found.detach(), part, pack)]
        if hidden:
            with torch.no_grad() if case == "trainer_score" else contextlib.nullcontext():
                rows = trainer.hidden(tokens, **masks).detach().transpose(0, 1)
            states += [_plain(row) for row in _apart(rows, part, pack)]
    seconds = time.perf_counter() - start_time
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0
    return Scores(out, states, seconds, peak)


def _apart(rows: torch.Tensor, part: Tokens, pack: bool) -> list[torch.Tensor]:
    """[B, S, ...] or packed [1, S, ...] -> each sequence's own rows, on the host."""
    rows = rows.cpu()
    if pack:
        return list(rows[0, : sum(map(len, part))].split([len(s) for s in part]))
    return [row[: len(s)] for row, s in zip(rows, part, strict=True)]


def _plain(row: torch.Tensor) -> np.ndarray:
    row = row.contiguous()
    return (row.view(torch.int16) if row.dtype is torch.bfloat16 else row).numpy()


def random_model(folder: str | Path, seed: int = 0) -> IsoGPTModel:
    """A trainer of random weights for the config.json in `folder`, as on an H200 where no checkpoint can be had.

    The weights come from the CPU's generator, so that another runtime on any machine can make the same ones:
    isojax.model.weights.random(load_config(folder), seed). For example, on the H200:

        from bridges.megatron import score
        trainer = score.random_model("shared/lab/h200/qwen3-1.7b")
        print(score.score(trainer, [[1, 2, 3, 4]], case="trainer_fwd", hidden=True))

    Raises: CheckpointError, ConfigError, Unavailable.
    """
    start.single()
    config = load_config(folder)
    return models.build(config, weights.random(config, seed))
