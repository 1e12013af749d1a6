"""Gradients of a real Megatron model: right (float64), the same under recompute, and in fp32 in main_grad."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bridges.megatron import model
from bridges.megatron import rows as finder
from bridges.megatron import weights as names
from bridges.megatron.score import padded
from isojax.model import layout, weights
from tests.integration import models
from tests.integration.megatron.conftest import bits
from tests.integration.megatron.test_parity import FULL


def token_loss(logprobs, mask):
    """Mean over the tokens that have a next one."""
    weight = torch.zeros_like(logprobs)
    for i, n in enumerate(mask.sum(1).tolist()):
        weight[i, : n - 1] = 1
    return -(logprobs * weight).sum() / weight.sum()


def gradients(trainer, sequences):
    tokens, labels, mask = padded(sequences)
    trainer.zero_grad()
    token_loss(trainer.logprobs(tokens, labels, case="trainer_fwd", attention_mask=mask), mask).backward()
    return {n: p.grad.clone() for n, p in trainer.named_parameters()}


def truth(path, sequences):
    """Gradients by transformers in float64, under Hugging Face names."""
    from transformers import AutoModelForCausalLM

    m = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    total = sum(len(s) - 1 for s in sequences)
    for s in sequences:
        if len(s) > 1:
            rows = torch.log_softmax(m(torch.tensor([s])).logits[0, :-1], -1)
            (-rows.gather(1, torch.tensor(s[1:])[:, None]).sum() / total).backward()
    return {n: p.grad for n, p in m.named_parameters()}


def errors(found, expected, config):
    """Relative error of each Hugging Face tensor's gradient, in the Frobenius norm."""
    packed = {ours: found[theirs] for ours, theirs in names.names(config).items()}
    grads = {n: p.read(packed[p.param]) for n, p in layout.placements(config).items()}
    return {n: float((g.double() - expected[n]).norm() / expected[n].norm()) for n, g in grads.items()}


@pytest.mark.parametrize("family", models.FAMILIES)
def test_against_float64(cases, family):
    """Bounds, in the Frobenius norm, from rounding errors that are independent and so add in squares.

    float32: each product chain (K <= 512) errs by about sqrt(K) 2^-24 = 1.3e-6, and a gradient passes through some 20
    of them forward and back, in squares 6e-6; 1e-5 is above that (measured: 2e-6). A wrong term would be of order 1.
    bfloat16: every stored value (some 15 on the way of a gradient) errs by at most 2^-9 = 2e-3, in squares under 1e-2,
    amplified by norms and the softmax; 5e-2 leaves a factor of five (measured: 2e-2).
    """
    c = cases(family)
    expected = truth(c.path, c.sequences)
    config, params = weights.load(c.path, "float32")
    worst = errors(gradients(model.build(config, params), c.sequences), expected, config)
    assert max(worst.values()) < 1e-5, worst
    worst = errors(gradients(model.build(c.config, c.params), c.sequences), expected, c.config)
    assert max(worst.values()) < 5e-2, worst


@pytest.mark.parametrize("method", ["uniform", "block"])
def test_recompute_gives_the_same_bits(cases, method):
    c = cases("qwen3")
    kept = gradients(model.build(c.config, c.params), c.sequences)
    again = gradients(model.build(c.config, c.params, **(FULL | {"recompute_method": method})), c.sequences)
    assert kept.keys() == again.keys() and len(kept) > 10
    assert all((bits(kept[n]) == bits(again[n])).all() for n in kept)


def test_padding_rows_add_nothing_to_any_gradient(cases, monkeypatch):
    """Two more tiles of padding: finite, the same bits in the weights of linears, whose sums go by tiles of tokens; a
    norm's or the head's sum over rows is XLA's on CPU, so there the order of fp32 additions may change (2^-7 of bf16).
    """
    c = cases("qwen3")
    without = gradients(model.build(c.config, c.params), c.sequences)
    monkeypatch.setattr(finder, "rows_for", lambda tokens, arch: 16 * -(-tokens // 16) + 32)
    padded = gradients(model.build(c.config, c.params), c.sequences)
    same = 0
    for n, g in padded.items():
        assert torch.isfinite(g).all() and (g - without[n]).norm() <= 2**-7 * without[n].norm(), n
        if "linear_" in n and g.dim() == 2:
            assert (bits(g) == bits(without[n])).all(), n
            same += 1
    assert same == 4 * c.config.layers


def wrapped(c, **overrides):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    trainer = model.build(c.config, c.params, **overrides)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    return DistributedDataParallel(trainer.config, config, trainer)


def main_grad(p: Any) -> torch.Tensor:
    """Megatron hangs it on a parameter; torch's types know nothing of it."""
    return p.main_grad


def backward(ddp, sequences):
    tokens, labels, mask = padded(sequences)
    loss = ddp(tokens, None, mask, labels=labels)
    token_loss(-loss, mask).backward()


@pytest.mark.parametrize("family", ["qwen3", "llama"])  # llama's head is tied: two layers share a parameter
@pytest.mark.parametrize("recompute", [{}, FULL], ids=["kept", "recomputed"])
def test_main_grad_holds_the_unrounded_gradient(cases, family, recompute):
    c = cases(family)
    rounded = gradients(model.build(c.config, c.params), c.sequences)
    ddp = wrapped(c, **recompute)
    ddp.zero_grad_buffer()
    backward(ddp, c.sequences)
    finer = 0
    for n, p in ddp.module.named_parameters():
        exact = main_grad(p)
        assert exact.dtype == torch.float32 and p.grad is None
        if c.config.tied and n == "embedding.word_embeddings.weight":
            # Without main_grad autograd rounds the head's and the embedding's part, and their sum: 3 times 2^-9.
            error = (exact - rounded[n].float()).norm() / exact.norm()
            assert error < 3 * 2**-9
        else:
            assert torch.equal(exact.to(p.dtype), rounded[n]), n
        finer += int((exact != exact.to(p.dtype).float()).sum())
    assert finer > 0  # the bits below bf16 are there
    assert isinstance(ddp.module, model.IsoGPTModel)
    runtime = ddp.module.runtime
    for call in (runtime.layer, runtime.embed, runtime.logprob):
        for f in call.compiled.values():  # weights' gradients were added where they are made: no backward without
            assert vars(f)["adding"][1] and "backward" not in vars(f)


def test_main_grad_accumulates_micro_batches_in_fp32(cases):
    c = cases("qwen3")
    ddp = wrapped(c)
    parts = (c.sequences[:4], c.sequences[4:])
    each = []
    for part in parts:
        ddp.zero_grad_buffer()
        backward(ddp, part)
        each.append({n: main_grad(p).clone() for n, p in ddp.module.named_parameters()})
    ddp.zero_grad_buffer()
    for part in parts:
        backward(ddp, part)
    for n, p in ddp.module.named_parameters():
        assert torch.equal(main_grad(p), each[0][n] + each[1][n]), n


def test_a_frozen_parameter_gets_no_gradient(cases):
    c = cases("qwen3")
    trainer = model.build(c.config, c.params)
    frozen = trainer.get_parameter("decoder.layers.0.mlp.linear_fc2.weight").requires_grad_(False)
    tokens, labels, mask = padded(c.sequences)
    trainer.logprobs(tokens, labels, case="trainer_fwd", attention_mask=mask).sum().backward()
    assert frozen.grad is None
    assert trainer.get_parameter("decoder.layers.0.mlp.linear_fc1.weight").grad is not None
