"""What both engines are given: a random checkpoint, prompts, and what is timed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isojax.errors import InputError

SHAPES: dict[str, dict[str, Any]] = {  # Hugging Face's names
    "tiny": dict(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
    ),
    "qwen3-1.7b": dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "qwen3-8b": dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """model: a name in SHAPES. layers: how many of its layers, 0 for all.

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
    utilization: float = 0.6
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0

    def validated(self) -> Workload:
        """self. Raises InputError for an unknown model or sizes with which nothing would be measured."""
        if self.model not in SHAPES:
            raise InputError(f"model {self.model!r} is unknown; use {', '.join(SHAPES)}")
        if not self.steps and not self.requests:
            raise InputError("nothing to measure; give --steps or --requests")
        longest = max([p for _, p in self.steps] + [1024 * bool(self.requests)])
        if longest + max(self.decode, 256) > self.context:
            raise InputError(f"prompts of {longest} tokens do not fit a context of {self.context}; raise --context")
        return self

    @property
    def vocab(self) -> int:
        return SHAPES[self.model]["vocab_size"]

    def prompts(self, count: int, length: int, salt: int) -> list[list[int]]:
        """Random token ids, others for each salt, so that no prefix is found in the cache."""
        rng = np.random.default_rng((self.seed, count, length, salt))
        return rng.integers(0, self.vocab, (count, length)).tolist()

    def batch(self, salt: int) -> tuple[list[list[int]], list[int]]:
        """(prompts, new tokens) of the continuous batch: the same lengths for each salt, other tokens."""
        sizes, rng = np.random.default_rng(self.seed), np.random.default_rng((self.seed, salt))
        lens = sizes.integers(32, 1025, self.requests)
        return [rng.integers(0, self.vocab, n).tolist() for n in lens], sizes.integers(64, 257, self.requests).tolist()

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
    from isojax.model.config import from_hf

    shape: dict[str, Any] = SHAPES[work.model]
    if work.layers:
        shape = shape | dict(num_hidden_layers=work.layers)
    hf = Qwen3Config(
        **shape,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
    )
    folder.mkdir(parents=True, exist_ok=True)
    config = from_hf(hf)
    params = weights.random(config, seed=work.seed, device="cuda" if torch.cuda.is_available() else "cpu")
    tensors = {k: v.cpu().contiguous() for k, v in weights.to_hf(params, config).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    hf.save_pretrained(folder)
    return folder
