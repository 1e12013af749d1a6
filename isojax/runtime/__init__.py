"""The standalone JAX runtime: the numerical reference that both engines are compared with."""

from isojax.runtime.reference import Reference

__all__ = ["Reference"]
