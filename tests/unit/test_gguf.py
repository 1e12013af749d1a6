"""GGUF files of each supported type, written with the gguf package, give back the tensors that they were made from."""

import gguf
import numpy as np
import pytest
import torch

from isojax.errors import CheckpointError
from isojax.model import weights
from isojax.model.layout import placements
from tests.integration import models

GGUF_NAME = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleaved(w, heads):
    """llama.cpp's order of a rotated projection's rows: pairs (i, i + D/2) side by side."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(w.shape)


def gguf_name(name):
    if not name.startswith("model.layers."):
        return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[
            name[:-7]
        ] + ".weight"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAME[part[:-7]]}.weight"


def write(path, hf, tensors, kind):
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(hf.num_hidden_layers)
    writer.add_context_length(hf.max_position_embeddings)
    writer.add_embedding_length(hf.hidden_size)
    writer.add_feed_forward_length(hf.intermediate_size)
    writer.add_head_count(hf.num_attention_heads)
    writer.add_head_count_kv(hf.num_key_value_heads)
    writer.add_layer_norm_rms_eps(hf.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(hf.vocab_size)
    expected = {}
    for name, tensor in tensors.items():
        w = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            w = interleaved(w, hf.num_attention_heads if "q_proj" in name else hf.num_key_value_heads)
        as_type = kind if w.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(w, as_type)
        writer.add_tensor(gguf_name(name), data, raw_dtype=as_type)
        plain = tensor.float().numpy()
        exact = gguf.quants.dequantize(gguf.quants.quantize(plain, as_type), as_type)  # rows are quantised one by one
        expected[name] = torch.from_numpy(np.ascontiguousarray(exact.reshape(plain.shape))).bfloat16()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture(scope="module")
def original():
    hf = models.hf_config("llama", tie_word_embeddings=False)
    model = models.hf_model("llama", tie_word_embeddings=False)
    return hf, {k: v.detach() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_types(kind, original, tmp_path):
    hf, tensors = original
    expected = write(tmp_path / "m.gguf", hf, tensors, gguf.GGMLQuantizationType[kind])
    config, params = weights.load(tmp_path / "m.gguf")
    assert set(expected) == set(placements(config))
    for name, tensor in weights.to_hf(params, config).items():
        assert torch.equal(tensor.view(torch.int16), expected[name].view(torch.int16)), name


def test_other_types_are_refused_by_name(original, tmp_path):
    hf, tensors = original
    write(tmp_path / "m.gguf", hf, tensors, gguf.GGMLQuantizationType.Q5_1)
    with pytest.raises(CheckpointError, match="Q5_1.*supported"):
        weights.load(tmp_path / "m.gguf")
