"""Where tokens lie, and how few bytes move to bring them into packed rows."""

from __future__ import annotations

import pytest
import torch

from bridges.megatron.rows import RowFinder, rows_for
from bridges.megatron.score import packed
from bridges.models import MODELS


def find(lens, slot=1):
    tokens, _, packing = packed([[1] * n for n in lens], slot)
    return RowFinder(MODELS["tiny"], "cpu").find((tokens.shape[1], 1), torch.device("cpu"), packed_seq_params=packing)


@pytest.mark.parametrize(
    "lens, slot, whole",
    [((40, 24), 1, True), ((40, 21), 1, True), ((40, 21), 8, False)],
    ids=("as is", "padded", "slots"),
)
def test_pack_and_unpack_are_each_others_inverse_and_transpose(lens, slot, whole):
    rows = find(lens, slot)
    s, n = rows.shape[0], sum(lens)
    assert rows.whole == whole and rows.padded == rows_for(n, "cpu") and len(rows.index) == n
    x = torch.randn(s, 1, 3, requires_grad=True)
    y = rows.pack(x)
    assert y.shape == (rows.padded, 3) and torch.equal(y[:n], x.reshape(-1, 3)[rows.index]) and not y[n:].any()
    back = rows.unpack(y)
    real = torch.zeros(s, dtype=torch.bool).index_fill_(0, rows.index, True)
    assert torch.equal(back[real], x[real]) and not back[~real].any()
    ct = torch.randn_like(back)
    back.backward(ct)
    assert x.grad is not None
    assert torch.equal(x.grad[real], ct[real]) and not x.grad[~real].any()


def test_nothing_is_copied_where_the_rows_fit():
    rows = find((40, 24))
    x = torch.randn(64, 1, 3)
    assert rows.pack(x).data_ptr() == x.data_ptr() == rows.unpack(rows.pack(x)).data_ptr()
    rows = find((40, 21))
    y = torch.randn(rows.padded, 3)
    assert rows.unpack(y).data_ptr() == y.data_ptr()


@pytest.mark.parametrize("arch, quantum", [("cpu", 16), ("sm90", 64)])
def test_at_most_an_eighth_is_padding(arch, quantum):
    for n in (1, quantum, quantum + 1, 1000, 4097, 8192, 9000, 16385):
        padded = rows_for(n, arch)
        assert padded >= n and padded % quantum == 0 and padded - n < max(quantum, n / 8)
    assert rows_for(8192, "sm90") == 8192


@pytest.mark.parametrize("arch", ["cpu", "sm90"])
@pytest.mark.parametrize("lens", [(40, 24), (40, 21), (130, 3, 700), (1,)], ids=str)
def test_every_row_is_in_a_sequence_that_attention_computes(arch, lens):
    """attn.core leaves rows unspecified that no tile covers; a gradient would multiply such a NaN by zero."""
    tokens, _, packing = packed([[1] * n for n in lens])
    rows = RowFinder(MODELS["tiny"], arch).find((tokens.shape[1], 1), torch.device("cpu"), packed_seq_params=packing)
    b = rows.batch
    cu, seen = b.cu_q.tolist(), torch.zeros(rows.padded, dtype=torch.int64)
    for request, first in b.work.tolist():
        if request >= 0:
            start = cu[request] + first
            seen[start : min(start + b.tile, cu[request + 1])] += 1
    assert cu[-1] == rows.padded and (seen == 1).all()
