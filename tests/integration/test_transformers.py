"""Right, not only equal: logits against transformers on the same weights.

Tolerances. float32: both sides sum in fp32 in different orders; K <= 512 terms of order 1 give relative error near
sqrt(K) 2^-24, doubled over two layers and the softmax: 2e-5 of the largest logit is generous by a few times. bfloat16:
transformers in float32 on the same (bf16-representable) weights is the truth; our rounding points (residual, q, k, v,
probabilities, MLP) are those of any bf16 model, so our error must not exceed twice that of transformers' own bf16 run.
"""

import numpy as np
import pytest
import torch

from isojax.model import weights
from isojax.runtime import Reference
from tests.integration import models


def truth(model, sequences):
    with torch.no_grad():
        rows = [model(torch.tensor([s])).logits[0].double() for s in sequences]
    return [torch.log_softmax(r, -1).numpy() for r in rows]


@pytest.fixture(scope="module", params=models.FAMILIES)
def checkpoint(request, tmp_path_factory):
    return request.param, models.save(request.param, tmp_path_factory.mktemp(request.param))


def test_float32(checkpoint):
    family, folder = checkpoint
    sequences = models.prompts(4, seed=3)
    expected = truth(models.hf_model(family).double(), sequences)
    got = Reference.load(folder, "float32").score(sequences)
    for e, g in zip(expected, got, strict=True):
        assert np.abs(e - g).max() < 2e-5 * np.abs(e).max()


def test_bfloat16_is_as_good_as_transformers_own(checkpoint):
    family, folder = checkpoint
    sequences = models.prompts(4, seed=4)
    expected = truth(models.hf_model(family).double(), sequences)
    own = truth(models.hf_model(family).bfloat16(), sequences)
    got = Reference.load(folder).score(sequences)
    error = lambda rows: np.sqrt(np.mean([np.mean((e - r) ** 2) for e, r in zip(expected, rows, strict=True)]))
    assert 0 < error(got) < 2 * error(own)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "scaling", [{"rope_type": "linear"}, {"rope_type": "llama3", **LLAMA3}], ids=["linear", "llama3"]
)
def test_scaled_rope(scaling, tmp_path):
    rope = {"rope_theta": 10000.0, "factor": 4.0, **scaling}
    folder = models.save("llama", tmp_path, rope_parameters=rope)
    sequences = models.prompts(2, seed=5)
    expected = truth(models.hf_model("llama", rope_parameters=rope).double(), sequences)
    for e, g in zip(expected, Reference.load(folder, "float32").score(sequences), strict=True):
        assert np.abs(e - g).max() < 2e-5 * np.abs(e).max()


def test_sharded_checkpoint_loads_the_same(checkpoint, tmp_path):
    family, folder = checkpoint
    models.hf_model(family).bfloat16().save_pretrained(tmp_path, max_shard_size="500KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    one, many = weights.load(folder)[1], weights.load(tmp_path)[1]
    assert one.keys() == many.keys()
    assert all(torch.equal(one[k], many[k]) for k in one)


def test_export_gives_back_every_tensor(checkpoint):
    family, folder = checkpoint
    config, params = weights.load(folder)
    original = models.hf_model(family).bfloat16().state_dict()
    out = weights.to_hf(params, config)
    assert all(torch.equal(out[name], original[name]) for name in out)
    assert set(original) - set(out) <= {"lm_head.weight"}


@pytest.mark.slow
def test_smollm2_against_transformers_own_gguf_loader():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from isojax import demo

    folder, gguf = demo.checkpoint(), demo.gguf()
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config, params = weights.load(gguf)
    ours, theirs = weights.to_hf(params, config), loaded.state_dict()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].bfloat16()), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sequences = [list(tokenizer(p).input_ids) for p in demo.PROMPTS[:4]]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = truth(model, sequences)
    own = truth(model.bfloat16(), sequences)
    got = Reference.load(folder).score(sequences)
    error = lambda rows: np.sqrt(np.mean([np.mean((e - r) ** 2) for e, r in zip(expected, rows, strict=True)]))
    assert 0 < error(got) < 2 * error(own)


def test_two_processes_may_export_the_same_checkpoint(checkpoint, tmp_path, monkeypatch):
    import os

    _, folder = checkpoint
    target, real = tmp_path / "out", os.replace

    def late(source, destination):
        if not target.exists():  # the other process finishes just before us
            monkeypatch.setattr(os, "replace", real)
            weights.export(folder, target)
        return real(source, destination)

    monkeypatch.setattr(os, "replace", late)
    assert weights.export(folder, target) == target
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and (target / "model.safetensors").is_file()
