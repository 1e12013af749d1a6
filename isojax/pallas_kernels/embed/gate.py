"""Gate of the embedding: a row is a copy of one table row."""

from __future__ import annotations

import numpy as np

from isojax.gates.case import Case, ill_conditioned
from isojax.pallas_kernels.embed import lookup

VOCAB, COLUMNS = 300, 576


@lookup.gate_cases
def cases(rng, rows):
    tokens = rng.integers(0, VOCAB, rows).astype(np.int32)
    table = ill_conditioned(rng, VOCAB, COLUMNS)
    return Case("copy", (table, tokens), exact=lambda table, tokens: table.astype(np.float64)[tokens])
