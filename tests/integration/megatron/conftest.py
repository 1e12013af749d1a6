"""One real Megatron-Core world of one process, and tiny checkpoints with what the JAX reference says about them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from bridges.megatron import start
from isojax.model import weights
from isojax.model.config import DenseConfig
from isojax.runtime import Reference
from tests.integration import models

LENGTHS = (9, 13, 1, 16, 3, 7, 10, 5)  # 64 rows together, 16 at most apart: few shapes to compile
TEMPERATURES = (1.0, 0.7)


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.megatron)


@pytest.fixture(scope="module", autouse=True)
def world():
    """Anew for each module: a vLLM engine that ran in this process meanwhile ends the world it finds."""
    start.single()
    yield
    start.stop()


@dataclass
class Case:
    """A checkpoint, its sequences, and the reference's bits."""

    family: str
    path: Path
    config: DenseConfig
    params: dict[str, torch.Tensor]
    sequences: list[list[int]]
    logprobs: dict[float, list[np.ndarray]]
    rows: list[np.ndarray]


@pytest.fixture(scope="session")
def cases(tmp_path_factory):
    made: dict[str, Case] = {}

    def case(family: str) -> Case:
        if family not in made:
            path = models.checkpoint(tmp_path_factory.mktemp("megatron"), family)
            config, params = weights.load(path)
            reference = Reference(config, weights.as_jax(params))
            rng = np.random.default_rng(7)
            sequences = [rng.integers(3, config.vocab, n).tolist() for n in LENGTHS]
            logprobs = {t: reference.logprobs(sequences, t) for t in TEMPERATURES}
            made[family] = Case(family, path, config, params, sequences, logprobs, reference.score(sequences))
        return made[family]

    return case


def bits(x):
    """Floats as unsigned integers: -0.0 and NaN payloads count."""
    x = x.detach().numpy() if isinstance(x, torch.Tensor) and x.dtype != torch.bfloat16 else x
    if isinstance(x, torch.Tensor):
        return x.detach().contiguous().view(torch.int16).numpy()
    return np.ascontiguousarray(x).view(np.uint32)


def differing(found, expected):
    """How many elements of two lists of arrays differ in a bit."""
    assert sum(map(np.size, expected)) > 0
    return sum(int((bits(f) != bits(e)).sum()) for f, e in zip(found, expected, strict=True))


def unpadded(logprobs, sequences):
    """The log-probabilities of each sequence's own tokens but the first, from [B, S]."""
    return [row[: len(s) - 1] for row, s in zip(logprobs, sequences, strict=True)]


def unpacked(logprobs, sequences, slot=1):
    at, out = 0, []
    for s in sequences:
        out.append(logprobs[0, at : at + len(s) - 1])
        at += -(-len(s) // slot) * slot
    return out
