"""Hopper kernels of the embedding's gradient, without atomics: sort the positions by token, then add each token's rows.

Tokens with many rows are shared out by columns (frequent_sm90), the others are added by one block each (rows_sm90). The
two kernels run at the same time. Without `into` every row of the gradient is written once, and nothing filled before.
"""

from __future__ import annotations

import jax

from isojax.errors import Unsupported
from isojax.pallas_kernels.embed.frequent_sm90 import add_frequent
from isojax.pallas_kernels.embed.rows_sm90 import add_rows, write_rows
from isojax.pallas_kernels.embed.sort_sm90 import MOST_POSITIONS, MOST_TOKENS, POSITIONS, sort
from isojax.pallas_kernels.strips import THREADS, check_rows


def lookup_bwd_supports(tokens, ct, into=None, *, vocab):
    region = "embed.lookup_bwd"
    check_rows(region, ct, columns=ct.shape[1], widest=65536)
    if into is not None and ct.shape[1] % THREADS:  # strips would overlap, and add twice
        given, mend = f"{ct.shape[1]} columns with `into`", "add the gradient afterwards"
        raise Unsupported(region, given, f"a multiple of {THREADS} on sm90", mend)
    n = tokens.shape[0]
    if n % POSITIONS or n > MOST_POSITIONS:
        mend = "pad with rows whose ct is zero, or split the batch and add the gradients"
        raise Unsupported(region, f"{n} tokens", f"a multiple of {POSITIONS}, at most {MOST_POSITIONS}", mend)
    if vocab > MOST_TOKENS:
        raise Unsupported(region, f"a vocabulary of {vocab}", f"at most {MOST_TOKENS} on sm90", "use the cpu arch")


def lookup_bwd(tokens, ct, into=None, *, vocab):
    order, ranked = sort(tokens)
    if into is not None:
        grad = jax.new_ref(into)
        add_frequent(order, ranked, ct, grad)
        add_rows(order, ranked, ct, grad)
    else:
        grad = jax.new_ref(add_frequent(order, ranked, ct, vocab))
        write_rows(order, ranked, ct, grad)
    return jax.freeze(grad)
