"""What both trainers are given: a model's shape, packed rollouts, and how many FLOPs a step is worth."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from bridges.megatron.score import packed
from bridges.models import MODELS, cut
from isojax.errors import InputError
from isojax.model.config import DenseConfig, load_config


@dataclass(frozen=True)
class Workload:
    """model: a name in bridges.models or a checkpoint folder (its config.json; weights are random all the same).

    layers: how many of the model's are built, 0 for all. tokens: rows of a micro-batch. sequences: rollouts in it.
    steps: timed steps, after `warmup` others. parity: sequences whose log-probabilities are compared bit for bit.
    """

    model: str = "qwen3-1.7b"
    layers: int = 0
    tokens: int = 8192
    sequences: int = 8
    steps: int = 10
    warmup: int = 3
    parity: int = 2
    seed: int = 0

    def config(self, dtype: str) -> DenseConfig:
        """Raises: InputError for sizes that are not positive; CheckpointError, ConfigError for an unusable model."""
        for name in ("tokens", "sequences", "steps", "warmup", "parity"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)}; give at least 1")
        if self.tokens < 2 * self.sequences:
            raise InputError(f"{self.sequences} sequences in {self.tokens} tokens; give at least two tokens to each")
        found = MODELS[self.model] if self.model in MODELS else load_config(self.model, dtype)
        return dataclasses.replace(cut(found, self.layers), dtype=dtype)


@dataclass(frozen=True)
class MicroBatch:
    """tokens, labels [1, T] int64; old, advantages, mask [1, T] fp32: what the behaviour policy and the reward said."""

    sequences: list[list[int]]
    tokens: torch.Tensor
    labels: torch.Tensor
    packing: PackedSeqParams
    old: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor


def lengths(rng: np.random.Generator, tokens: int, sequences: int) -> list[int]:
    """`sequences` lengths of at least 2 that sum to `tokens`, the longest several times the shortest."""
    share = rng.uniform(0.25, 1.75, sequences)
    lens = 2 + np.floor((tokens - 2 * sequences) * share / share.sum()).astype(int)
    lens[0] += tokens - lens.sum()
    return lens.tolist()


def micro_batches(work: Workload, vocab: int, count: int, device: torch.device) -> list[MicroBatch]:
    """`count` micro-batches, each with tokens and cuts of its own; the same in every process."""
    rng = np.random.default_rng(work.seed)
    return [_micro_batch(rng, work, vocab, device) for _ in range(count)]


def _micro_batch(rng: np.random.Generator, work: Workload, vocab: int, device: torch.device) -> MicroBatch:
    sequences = [rng.integers(0, vocab, n).tolist() for n in lengths(rng, work.tokens, work.sequences)]
    tokens, labels, packing = packed(sequences, device=device)
    there = lambda x: torch.from_numpy(np.ascontiguousarray(x, np.float32)[None]).to(device)
    ends = np.cumsum([len(s) for s in sequences]) - 1
    mask = np.ones(work.tokens)
    mask[ends] = 0  # a sequence's last token has no next one
    advantage = np.repeat(rng.standard_normal(work.sequences), [len(s) for s in sequences])
    old = -np.log(vocab) + 0.05 * rng.standard_normal(work.tokens)
    return MicroBatch(sequences, tokens, labels, packing, there(old), there(advantage), there(mask))


def flops(config: DenseConfig, batch: MicroBatch) -> float:
    """Model FLOPs of forward and backward of one micro-batch: products once each way, causal attention by its mask.

    Nothing that a trainer recomputes is counted, nor the optimizer.
    """
    c = config
    layer = c.hidden * (c.qkv_width + c.heads * c.head_dim + 3 * c.intermediate)
    products = 6.0 * batch.tokens.numel() * (c.layers * layer + c.vocab * c.hidden)
    pairs = sum(n * (n + 1) / 2 for n in map(len, batch.sequences))
    return products + 12.0 * c.layers * c.heads * c.head_dim * pairs
