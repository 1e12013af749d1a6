"""Which dense decoders can run, read from a Hugging Face configuration.

Refusals look at effective values: a Qwen2 configuration that carries `sliding_window` while `use_sliding_window` is off
is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from isojax.errors import CheckpointError, ConfigError

FAMILIES = ("llama", "qwen2", "qwen3")
ROPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding (Su et al., arXiv 2104.09864). llama3: frequency bands as in Llama 3.1's release."""

    kind: Literal["default", "linear", "llama3"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True)
class DenseConfig:
    """A dense decoder: Llama, Qwen2 or Qwen3. Sizes in elements."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    positions: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    zero_centered: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    rope: Rope = field(default_factory=Rope)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def scale(self) -> float:
        """Softmax scale, D^-1/2."""
        return self.head_dim**-0.5


def from_hf(hf: Any, dtype: str = "bfloat16") -> DenseConfig:
    """DenseConfig of a transformers configuration.

    Raises: ConfigError, naming the field, its value, what is supported and a mend.
    """
    family = str(getattr(hf, "model_type", None))
    if family not in FAMILIES:
        _refuse("model_type", family, f"one of {', '.join(FAMILIES)}", "use another model")
    _check_effective(hf, family)
    heads = hf.num_attention_heads
    kv_heads = getattr(hf, "num_key_value_heads", None) or heads
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    if heads % kv_heads:
        _refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}", "repair the config")
    if head_dim % 16:
        _refuse("head_dim", head_dim, "a multiple of 16", "use another model")
    if dtype not in ("bfloat16", "float32"):
        _refuse("dtype", dtype, "bfloat16 (float32 on the cpu arch)", "convert the checkpoint")
    return DenseConfig(
        family=family,
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        intermediate=hf.intermediate_size,
        layers=hf.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=hf.rms_norm_eps,
        positions=hf.max_position_embeddings,
        tied=bool(getattr(hf, "tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        dtype=dtype,  # type: ignore[arg-type]
        rope=_rope(hf),
    )


def load_config(path: str | Path, dtype: str = "bfloat16") -> DenseConfig:
    """DenseConfig of a checkpoint folder (config.json) or a GGUF file.

    Raises: CheckpointError where there is no readable configuration, ConfigError where it is not supported.
    """
    return from_hf(hf_config(path), dtype)


def hf_config(path: str | Path) -> Any:
    """The transformers configuration of a checkpoint folder or a GGUF file. Raises CheckpointError."""
    from transformers import AutoConfig

    path = Path(path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist; give a .gguf file or a folder with config.json")
        try:
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        except Exception as e:
            raise CheckpointError(f"{path} is no readable GGUF file ({e}); download it again") from e
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} holds no config.json; give a Hugging Face checkpoint folder or a .gguf file")
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as e:
        raise CheckpointError(f"{path / 'config.json'} is not readable ({e}); restore it") from e


def tokenizer(path: str | Path) -> Any:
    """The tokenizer of a checkpoint folder or a GGUF file. Raises CheckpointError."""
    from transformers import AutoTokenizer

    path = Path(path)
    try:
        if path.suffix == ".gguf":
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        return AutoTokenizer.from_pretrained(path)
    except Exception as e:
        reason = str(e).strip().splitlines()[0]
        raise CheckpointError(f"{path} has no tokenizer that transformers reads ({reason}); add tokenizer.json") from e


def _refuse(name: str, value: Any, allowed: str, mend: str) -> None:
    raise ConfigError(f"config field {name} = {value!r} is not supported; allowed: {allowed}; {mend}")


def _check_effective(hf: Any, family: str) -> None:
    get = lambda name, default=None: getattr(hf, name, default)
    if get("hidden_act", "silu") not in ("silu", "swish"):
        _refuse("hidden_act", hf.hidden_act, "silu", "use a SwiGLU model")
    if get("mlp_bias", False):
        _refuse("mlp_bias", True, "False", "use a model without MLP biases")
    if get("attention_bias", False):
        _refuse("attention_bias", True, "False (Qwen2's own q/k/v biases are supported)", "use another model")
    if get("attention_dropout", 0.0):
        _refuse("attention_dropout", hf.attention_dropout, "0.0", "set it to 0.0: scoring and sampling have no dropout")
    if get("use_sliding_window", False) or "sliding_attention" in (get("layer_types") or ()):
        _refuse("use_sliding_window", get("use_sliding_window"), "False", "use a model with full attention")
    if get("quantization_config") is not None:
        _refuse("quantization_config", "set", "absent", "dequantise the checkpoint to bfloat16 first")
    if (get("partial_rotary_factor") or 1.0) != 1.0:
        _refuse("partial_rotary_factor", hf.partial_rotary_factor, "1.0", "use another model")
    if get("pretraining_tp", 1) not in (1, None):
        _refuse("pretraining_tp", hf.pretraining_tp, "1", "set it to 1")


def _rope(hf: Any) -> Rope:
    raw = dict(getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {})
    kind = raw.get("rope_type", raw.get("type", "default")) or "default"
    theta = float(raw.get("rope_theta", getattr(hf, "rope_theta", 10000.0)))
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        _refuse("rope_parameters.partial_rotary_factor", raw["partial_rotary_factor"], "1.0", "use another model")
    if kind not in ROPES:
        _refuse("rope_parameters.rope_type", kind, ", ".join(ROPES), "use a model with one of these")
    if kind == "default":
        return Rope(theta=theta)
    rope = Rope(kind, theta, float(raw["factor"]))
    if kind == "linear":
        return rope
    return Rope(
        kind,
        theta,
        float(raw["factor"]),
        float(raw["low_freq_factor"]),
        float(raw["high_freq_factor"]),
        int(raw["original_max_position_embeddings"]),
    )
