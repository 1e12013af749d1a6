"""The models whose shapes are benchmarked and tuned: one list for every family's bench.py and for `isojax tune`.

Sizes are those of one rank: a model at tensor-parallel degree 8 has an eighth of the heads and of the feed-forward
width. Taken from the models' published configurations.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS = (1, 8, 32, 64, 128, 256, 1024, 4096, 8192, 16384)  # M of the linears: a decode step up to a trainer's batch
MIXED_ROWS = (1100, 1400)  # of an engine's steps that decode and take prompts: an engine pads them as `padded` does
BATCH_ROWS = (64, 256, 1024, 4096, 8192, 16384)  # M of memory-bound regions: decode, prompts, a trainer's batch
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)  # of causal attention
SEQUENCES = (1, 8, 32, 64, 128, 256)  # of decode
DECODE_CONTEXTS = (128, 1024, 4096, 8192, 32768)
DECODE_TOKENS = 1 << 20  # most cached tokens of one decode case: sequences * context
QUANTUM = 64  # rows that an engine pads a batch to on sm90; a peer runs the true M


@dataclass(frozen=True)
class Model:
    """One rank of a dense decoder. ranks: its tensor-parallel degree. vocab: of the whole model."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    ranks: int = 1
    qkv_bias: bool = False
    qk_norm: bool = False
    eps: float = 1e-6

    @property
    def qkv(self) -> int:
        """Width of the packed q, k and v."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def column(self) -> tuple[tuple[str, int, int], ...]:
        """(part, N, K) of the column-parallel linears; the weight is [N, K]."""
        return ("qkv", self.qkv, self.hidden), ("gate_up", 2 * self.ffn, self.hidden)

    @property
    def row(self) -> tuple[tuple[str, int, int], ...]:
        """(part, N, K) of the row-parallel linears."""
        return ("o", self.hidden, self.heads * self.head_dim), ("down", self.hidden, self.ffn)

    @property
    def head(self) -> tuple[str, int, int]:
        """(part, N, K) of the rank's head."""
        return "head", self.vocab // self.ranks, self.hidden


QWEN3_1_7B = Model("Qwen3-1.7B", 2048, 16, 8, 128, 6144, 151936, qk_norm=True)
QWEN3_8B = Model("Qwen3-8B", 4096, 32, 8, 128, 12288, 151936, qk_norm=True)
MIMO_7B = Model("MiMo-7B", 4096, 32, 8, 128, 11008, 151680, qkv_bias=True, eps=1e-5)
LLAMA_70B_TP8 = Model("Llama-3-70B TP8", 8192, 8, 1, 128, 3584, 128256, ranks=8, eps=1e-5)
MODELS = (QWEN3_1_7B, QWEN3_8B, MIMO_7B, LLAMA_70B_TP8)


def distinct(*sizes: str) -> list[Model]:
    """The models without those that repeat another's sizes: distinct("hidden") has one model of each width."""
    seen: dict[tuple[int, ...], Model] = {}
    for m in MODELS:
        seen.setdefault(tuple(getattr(m, s) for s in sizes), m)
    return list(seen.values())


def padded(rows: int) -> int:
    """Rows that ours computes where the peer computes `rows`."""
    return -(-rows // QUANTUM) * QUANTUM


def decodes() -> list[tuple[int, int]]:
    """(sequences, context) of the decode cases: the grid, without those whose cache exceeds DECODE_TOKENS."""
    return [(s, c) for s in SEQUENCES for c in DECODE_CONTEXTS if s * c <= DECODE_TOKENS]
