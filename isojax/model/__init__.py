"""Models, written once in flax nnx out of regions, data movement and nothing else."""

from isojax.model.config import DenseConfig
from isojax.model.dense import Batch, Dense

__all__ = ["Batch", "Dense", "DenseConfig"]
