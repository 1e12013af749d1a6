"""What one runtime says about the generated tokens, kept as bit patterns so that a file loses nothing."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from isojax.errors import InputError

GRADIENT_CASE = "trainer_fwd"


@dataclass
class Sequence:
    """One request. logprob_bits: int32 views of the float32 log-probability of each generated token.

    row_digests: SHA-256 of each token's full-vocabulary row of log-probabilities, where the runtime recorded it.
    """

    prompt: list[int]
    tokens: list[int]
    logprob_bits: list[int]
    row_digests: list[str] = field(default_factory=list)

    @property
    def logprobs(self) -> np.ndarray:
        return np.array(self.logprob_bits, np.int32).view(np.float32)


@dataclass
class Record:
    """A runtime's run. runtime: 'vllm', 'megatron', 'jax'; flavour: 'stock' or 'isojax'; case: see contract.CaseId."""

    runtime: str
    flavour: str
    case: str
    sequences: dict[str, list[Sequence]]  # by sampling mode: greedy, sampled
    identities: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    peak_mib: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as f:
            json.dump(asdict(self), f)
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: Path) -> Record:
        raw = json.loads(path.read_text())
        raw["sequences"] = {mode: [Sequence(**s) for s in seqs] for mode, seqs in raw["sequences"].items()}
        return cls(**raw)


def bits(values: Any) -> list[int]:
    """int32 views of float32 values."""
    return np.ascontiguousarray(np.asarray(values, np.float32)).view(np.int32).tolist()


def check_pair(a: Record, b: Record) -> None:
    """Refuse a comparison that proves nothing. Raises InputError.

    Two records of one runtime always agree (an engine rescored by itself shows 0 while training diverges), and a
    trainer counts only by its gradient-carrying forward.
    """
    if a.runtime == b.runtime:
        raise InputError(
            f"both sides are {a.runtime}; a runtime compared with itself proves nothing; compare two runtimes"
        )
    for r in (a, b):
        if r.runtime == "megatron" and r.case != GRADIENT_CASE:
            raise InputError(
                f"the trainer's record is {r.case}; record {GRADIENT_CASE}, the forward that carries gradients"
            )
    if a.sequences.keys() != b.sequences.keys():
        raise InputError(
            f"the records hold {sorted(a.sequences)} and {sorted(b.sequences)}; run both on the same modes"
        )
    for mode in a.sequences:
        pairs = list(zip(a.sequences[mode], b.sequences[mode], strict=True))
        if any((x.prompt, x.tokens) != (y.prompt, y.tokens) for x, y in pairs):
            raise InputError(f"{mode}: the records hold different tokens; give the trainer the engine's tokens")
