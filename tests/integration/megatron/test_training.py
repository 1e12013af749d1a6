"""Megatron trains the same with our spec as with its own: DDP, its optimizer, ten steps in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bridges.megatron import cpu, model, stock
from bridges.megatron.score import padded
from isojax.model import weights
from tests.integration.megatron.conftest import differing, unpadded
from tests.integration.megatron.test_gradients import token_loss

STEPS = 10


def train(trainer, sequences):
    """Losses of ten Adam steps on one batch, with Megatron's DDP, gradient finalisation and optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    tokens, labels, mask = padded(sequences)
    causal = ~torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    ddp = DistributedDataParallel(trainer.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), trainer)
    losses = []
    with cpu.optimizer_devices():
        config = OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.0, clip_grad=0.0, params_dtype=torch.float32)
        optimizer = get_megatron_optimizer(config, [ddp])
        for _ in range(STEPS):
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            loss = token_loss(-ddp(tokens, positions, causal, labels=labels), mask)
            loss.backward()
            finalize_model_grads([ddp])
            optimizer.step()
            losses.append(loss.item())
    return np.array(losses)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_ten_steps_follow_the_stock_spec(cases, family):
    """Tolerance: the losses start within fp32 rounding of each other (1e-6). Adam's first steps have the size of the
    learning rate whatever the gradient's size, so an element whose gradient is rounding noise may step the other way;
    such elements move the loss by little because their gradient is little. 3e-5 of the loss bounds ten such steps
    (measured: 7e-6); the loss itself falls to a hundredth.
    """
    c = cases(family)
    config, params = weights.load(c.path, "float32")
    ours = train(model.build(config, params), c.sequences)
    theirs = train(stock.stock_model(config, params), c.sequences)
    assert ours[-1] < 0.1 * ours[0]
    assert abs(ours[0] - theirs[0]) < 2e-6 * theirs[0]
    assert (np.abs(ours - theirs) < 3e-5 * theirs).all(), (ours, theirs)


def test_the_stock_trainer_is_close_but_not_equal(cases):
    """The peer of the parity report: bf16, its own kernels. Close, so it is the same model; not equal, so no copy.

    A bf16 model's logits err by some 2^-9 of their size (2 at most here) at each of a few roundings: 5e-2 at most.
    """
    c = cases("qwen3")
    peer = stock.stock_model(c.config, c.params)
    tokens, labels, _ = padded(c.sequences)
    for temperature, expected in c.logprobs.items():
        with torch.no_grad():
            found = unpadded(peer.logprobs(tokens, labels, temperature=temperature), c.sequences)
        assert max(np.abs(f.numpy() - e).max() for f, e in zip(found, expected, strict=True) if len(e)) < 5e-2
        assert differing(found, expected) > 0
