"""The user's four uses as one test: a region defined out of the tree, in stock vLLM, in stock Megatron, and in JAX.

The region (examples/toy_region.py) takes the place of the first layer's input norm. Each runtime records what its call
received and returned; the same inputs have to give the same bits in all three.
"""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch

from tests.integration import models

pytestmark = [pytest.mark.engine, pytest.mark.megatron, pytest.mark.slow]

VLLM = """
import json, sys
from bridges.vllm.environment import prepare
prepare("cpu")
import torch
from bridges.torch_ops import region_op
from bridges.vllm import plug
from examples.toy_region import mean_abs_norm
from vllm import LLM, SamplingParams

seen = []
norm = region_op(mean_abs_norm)

def call(module, x, residual=None):
    x = x if residual is None else x + residual
    y = norm(x, module.weight.data, eps=1e-6)
    seen.append((x.clone(), y.clone()))
    return y if residual is None else (y, x)

llm = LLM(model=sys.argv[1], dtype="bfloat16", enforce_eager=True, max_model_len=128, max_num_batched_tokens=128,
          max_num_seqs=4, block_size=16)
print(llm.apply_model(plug("model.layers.0.input_layernorm", call)))  # the one line
seen.clear()
llm.generate([{"prompt_token_ids": json.loads(sys.argv[3])}], SamplingParams(max_tokens=4, temperature=0.0,
             ignore_eos=True, detokenize=False), use_tqdm=False)
torch.save(seen, sys.argv[2])
import os; sys.stdout.flush(); os._exit(0)
"""

MEGATRON = """
import sys, torch
from bridges.megatron import start
start.single()
from bridges.megatron.config import transformer_config
from bridges.megatron.plug import plug
from bridges.torch_ops import region_op
from examples.toy_region import mean_abs_norm
from isojax.model import weights
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

config, _ = weights.load(sys.argv[1])
norm = region_op(mean_abs_norm)
call = lambda x, weight: norm(x.reshape(-1, x.shape[-1]), weight, eps=1e-6).view_as(x)  # a region's rows are tokens
spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_norm, normalization="RMSNorm")
spec = plug(spec, "input_layernorm", lambda module, x: call(x, module.weight))  # the one line
model = GPTModel(transformer_config(config), spec, vocab_size=config.vocab, max_sequence_length=64,
                 position_embedding_type="rope").bfloat16()
inputs = torch.load(sys.argv[2])
layer = model.decoder.layers[0].input_layernorm
out = []
for x, y in inputs:
    leaf = x.clone().requires_grad_(True)
    with torch.no_grad():
        layer.weight.copy_(torch.load(sys.argv[3]))
    got = layer(leaf)
    got.float().sum().backward()
    out.append((got.detach(), leaf.grad, layer.weight.grad.clone()))
ids = torch.randint(3, config.vocab, (1, 16))
loss = model(ids, torch.arange(16)[None], ~torch.ones(1, 1, 16, 16, dtype=torch.bool).tril(), labels=ids)
loss.float().mean().backward()
assert torch.isfinite(layer.weight.grad).all() and layer.weight.grad.abs().sum() > 0
torch.save(out, sys.argv[4])
"""


def python(code, *args):
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": os.getcwd(), "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_one_region_three_runtimes(tmp_path):
    from examples.toy_region import mean_abs_norm
    from isojax.gates.bits import compare_all

    folder = models.save("llama", tmp_path / "model")
    weight = models.hf_model("llama").bfloat16().model.layers[0].input_layernorm.weight.detach()
    torch.save(weight, tmp_path / "weight.pt")
    printed = python(VLLM, folder, tmp_path / "vllm.pt", json.dumps(models.prompts(1, seed=9)[0]))
    assert "model.layers.0.input_layernorm" in printed
    python(MEGATRON, folder, tmp_path / "vllm.pt", tmp_path / "weight.pt", tmp_path / "megatron.pt")
    engine, trainer = torch.load(tmp_path / "vllm.pt"), torch.load(tmp_path / "megatron.pt")
    assert len(engine) == 4 and engine[0][0].shape[0] > engine[1][0].shape[0]  # one prefill, three decode steps

    numpy = lambda t: np.asarray(jax.numpy.asarray(t.float().numpy(), jax.numpy.bfloat16))
    for (x, y), (z, dx, dw) in zip(engine, trainer, strict=True):
        rows = x.shape[0]
        padded = np.concatenate([numpy(x), np.zeros((-rows % 16, x.shape[1]), numpy(x).dtype)])
        alone = np.asarray(mean_abs_norm(padded, numpy(weight), eps=1e-6))[:rows]
        assert compare_all((numpy(y),), (alone,)).differing == 0
        assert compare_all((numpy(z),), (alone,)).differing == 0
        assert torch.isfinite(dx).all() and torch.isfinite(dw).all()
    # control: another eps is seen
    other = np.asarray(mean_abs_norm(padded, numpy(weight), eps=1e-2))[:rows]
    assert compare_all((other,), (alone,)).differing > 0
