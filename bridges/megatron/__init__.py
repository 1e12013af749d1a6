"""IsoJAX in Megatron-Core: specs, model, log-probabilities and weights. Import a module to use it.

from bridges.megatron import model, start
start.single()  # or your own torch.distributed and Megatron initialisation
trainer = model.load("path/to/checkpoint")  # a GPTModel whose arithmetic is IsoJAX's
logp = trainer.logprobs(tokens, labels, case="trainer_fwd")
"""
