"""Tests run on JAX's CPU backend unless a GPU run says otherwise."""

import atexit
import os
import shutil
import tempfile

if "cuda" not in os.environ.get("JAX_PLATFORMS", ""):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU run asks for it: JAX_PLATFORMS=cuda,cpu pytest -m gpu
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Mosaic's interpreter holds a thread of XLA's pool for every warpgroup that waits at a barrier: a pool as small as this
# machine may be deadlocks. XLA takes its size from here.
os.environ.setdefault("NPROC", "16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# what is tested is made here, not kept from an earlier run
os.environ["ISOJAX_CACHE"] = tempfile.mkdtemp(prefix="isojax-tests-")
atexit.register(shutil.rmtree, os.environ["ISOJAX_CACHE"], ignore_errors=True)
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
