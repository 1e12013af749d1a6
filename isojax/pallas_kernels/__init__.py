"""Kernel families. One folder holds everything of a family:

__init__.py      its regions (signatures, constants, shapes, errors) and their wiring
reference.py     the schedule in jnp: the `cpu` implementation and the oracle of the kernel
kernel_sm90.py   Pallas kernels (Mosaic GPU) for Hopper
vjp.py           gradients, made of regions
gate.py          operands for the bit gates        bench.py   shapes, peer and floor for `isojax bench kernels`

Adding a family is adding a folder: isojax.region.load_shipped finds it.
What families share lies beside them: warpgroup (steps below Pallas), interpretable, strips, columns, chip, fused.
"""
