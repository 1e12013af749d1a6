"""Tiny random Hugging Face checkpoints, the same bytes on every machine, for tests that start real runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3")
VOCAB = 512


def hf_config(family: str, **changes: Any) -> Any:
    """Hidden 256, 2 layers, 4 heads over 2 KV heads of 64."""
    import transformers

    kinds = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
    sizes: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=family == "llama",
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    if family == "qwen2":
        del sizes["head_dim"]
    config = getattr(transformers, kinds[family])(**(sizes | changes))
    config.architectures = [kinds[family].replace("Config", "ForCausalLM")]
    config.dtype = "bfloat16"
    return config


def checkpoint(folder: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write config, weights and a word-level tokenizer (token i is the word `w{i}`); returns the folder."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from isojax.model import weights
    from isojax.model.config import from_hf

    path = folder / f"tiny-{family}-{seed}"
    if (path / "config.json").is_file():
        return path
    hf = hf_config(family, **changes)
    config = from_hf(hf)
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights.to_hf(weights.random(config, seed), config), path / "model.safetensors", {"format": "pt"})
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = {w: i for i, w in enumerate([*special, *(f"w{i}" for i in range(len(special), config.vocab))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(path)
    hf.save_pretrained(path)  # last: its presence says that the folder is whole
    return path


def hf_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """The transformers model with the weights of `checkpoint`, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    from isojax.model import weights
    from isojax.model.config import from_hf

    hf = hf_config(family, **changes)
    config = from_hf(hf)
    model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
    tensors = weights.to_hf(weights.random(config, seed), config)
    absent, unknown = model.load_state_dict({k: v.float() for k, v in tensors.items()}, strict=False)
    assert not unknown and set(absent) <= {"lm_head.weight"}, (absent, unknown)
    return model.eval()


def save(family: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """`checkpoint`, family first."""
    return checkpoint(folder, family, seed, **changes)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Random token sequences of 3 to 40 tokens."""
    import numpy as np

    rng = np.random.default_rng(seed)
    return [rng.integers(4, VOCAB, rng.integers(3, 41)).tolist() for _ in range(count)]
