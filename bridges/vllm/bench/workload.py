"""What both engines are given: a random checkpoint, prompts, and what is timed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridges.models import MODELS, cut
from isojax.errors import InputError
from isojax.model.config import DenseConfig

SEQUENCES = 256  # that an engine runs at once
CHECKED, CHECKED_NEW = (1, 17, 64, 300), 16  # prompt lengths that are compared with the reference, and new tokens
# Share of the GPU of each of the two engines. Each takes more than its share, for graphs and a context: stock's of 8B
# 18.6 GiB more, so that of an H200 a share of 0.45 leaves no room for ours.
UTILIZATION, MOST = 0.40, 0.45
BATCH_PROMPT, BATCH_NEW = 1024, 256  # at most, of the continuous batch


@dataclass(frozen=True)
class Workload:
    """model: a name in MODELS. layers: how many of its layers, 0 for all.

    steps: (sequences, prompt length) pairs; after the prompts, `decode` steps are timed. requests: of the continuous
    batch, with prompts of 32 to 1,024 tokens and 64 to 256 new ones. check: sequences compared with the reference.
    engine: further engine arguments for both sides.
    """

    model: str = "qwen3-1.7b"
    layers: int = 0
    steps: tuple[tuple[int, int], ...] = ((1, 128), (32, 128), (256, 128), (1, 4096), (32, 4096))
    decode: int = 64
    requests: int = 512
    check: int = 4
    context: int = 5120
    utilization: float = UTILIZATION
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0

    def validated(self) -> Workload:
        """self. Raises InputError for an unknown model or sizes with which nothing would be measured."""
        if self.model not in MODELS:
            raise InputError(f"model {self.model!r} is unknown; use {', '.join(MODELS)}")
        cut(MODELS[self.model], self.layers)
        if not self.steps and not self.requests:
            raise InputError("nothing to measure; give --steps or --requests")
        for count, length in self.steps:
            if not 1 <= count <= SEQUENCES or length < 1:
                raise InputError(f"steps of {count}x{length}; give 1 to {SEQUENCES} sequences, prompts of at least 1")
        if self.steps and self.decode < 2:
            raise InputError(f"{self.decode} decode steps; give at least 2: a step lasts until the next one begins")
        if not 0 <= self.check <= len(CHECKED):
            raise InputError(f"{self.check} sequences to compare; give 0 to {len(CHECKED)}")
        if not 0 < self.utilization <= MOST:
            raise InputError(f"a share of {self.utilization} of the GPU for each of two engines; give {MOST} at most")
        longest = max(
            [length + 1 + self.decode for _, length in self.steps]
            + [BATCH_PROMPT + BATCH_NEW] * bool(self.requests)
            + [n + CHECKED_NEW for n in CHECKED[: self.check]]
        )
        if longest > self.context:
            raise InputError(f"requests of {longest} tokens do not fit a context of {self.context}; raise --context")
        return self

    @property
    def config(self) -> DenseConfig:
        return cut(MODELS[self.model], self.layers)

    @property
    def vocab(self) -> int:
        return self.config.vocab

    def prompts(self, count: int, length: int, salt: int) -> list[list[int]]:
        """Random token ids, others for each salt, so that no prefix is found in the cache."""
        rng = np.random.default_rng((self.seed, count, length, salt))
        return rng.integers(0, self.vocab, (count, length)).tolist()

    def batch(self, salt: int) -> tuple[list[list[int]], list[int]]:
        """(prompts, new tokens) of the continuous batch: the same lengths for each salt, other tokens."""
        sizes, rng = np.random.default_rng(self.seed), np.random.default_rng((self.seed, salt))
        prompts = [rng.integers(0, self.vocab, n).tolist() for n in sizes.integers(32, BATCH_PROMPT + 1, self.requests)]
        return prompts, sizes.integers(64, BATCH_NEW + 1, self.requests).tolist()

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Workload:
        plain = json.loads(path.read_text())
        return cls(**plain | dict(steps=tuple(map(tuple, plain["steps"]))))


def checkpoint(work: Workload, folder: Path) -> Path:
    """A random bf16 checkpoint of the workload's shape as a Hugging Face folder, made where it is not there yet."""
    done = folder / "config.json"  # written last
    if done.exists():
        return folder
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config

    from isojax.model import weights

    c = work.config
    hf = Qwen3Config(
        vocab_size=c.vocab,
        hidden_size=c.hidden,
        intermediate_size=c.intermediate,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        tie_word_embeddings=c.tied,
        max_position_embeddings=c.positions,
        rms_norm_eps=c.eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
    )
    folder.mkdir(parents=True, exist_ok=True)
    params = weights.random(c, seed=work.seed, device="cuda" if torch.cuda.is_available() else "cpu")
    tensors = {k: v.cpu().contiguous() for k, v in weights.to_hf(params, c).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    hf.save_pretrained(folder)
    return folder
