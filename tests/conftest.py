"""Tests run on JAX's CPU backend unless a GPU run says otherwise."""

import os

if "cuda" not in os.environ.get("JAX_PLATFORMS", ""):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU run asks for it: JAX_PLATFORMS=cuda,cpu pytest -m gpu
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
