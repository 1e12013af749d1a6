import pytest
from contract_samples import ALL_CASES, contracts, entry, impl, sample, unsealed
from hypothesis import HealthCheck, given, settings

import contract as c

slow_build = settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow], deadline=None)


@slow_build
@given(contracts(), contracts())
def test_changes_account_for_exactly_the_digests_that_differ(one, other):
    old, new = c.recompute(one), c.recompute(other)
    digests = {name for name in c.Identities.model_fields if getattr(old, name) != getattr(new, name)}
    assert set(c.differences(one, other).moved) == digests


@slow_build
@given(contracts())
def test_a_contract_does_not_differ_from_itself_sealed_or_regrouped(doc):
    singles = [held.evolve(cases=(case,)) for _, case, held in reversed(list(doc.owners()))]
    assert c.differences(doc, c.seal(doc)).identical
    assert c.differences(doc, doc.evolve(composition=singles)).identical


@slow_build
@given(contracts(), contracts())
def test_the_way_back_mirrors_the_way_there(one, other):
    there, back = c.differences(one, other).changes, c.differences(other, one).changes
    assert [(x.path, x.moves) for x in there] == [(x.path, x.moves) for x in back]


@pytest.mark.parametrize(
    "change, path, kind, moves",
    [
        ({"name": "x"}, "name", "changed", ()),
        ({"model_family": "moe"}, "model_family", "changed", ("semantic",)),
        ({"toolchain": {"jax": "0.11.2", "jaxlib": "9"}}, "toolchain/jaxlib", "changed", ("numerical_policy",)),
        ({"deployment": {"a/b": {"c": 1}}}, "deployment/a~1b/c", "added", ("deployment",)),
        ({"state": ()}, "state/kv", "removed", ()),
        ({"cases": tuple(c.CASES[id] for id in ALL_CASES[1:])}, "cases/engine_decode", "removed", ("semantic",)),
    ],
)
def test_document_fields(change, path, kind, moves):
    found = {change.path: change for change in c.differences(sample(), unsealed(**change)).changes}
    assert (found[path].kind, found[path].moves) == (kind, moves)
    assert path in str(found[path])


def test_entry_fields_are_named_by_region_and_case():
    one = unsealed(composition=(entry("norms.rms", ("trainer_fwd",), constants={"row_tile": 1}),))
    two = unsealed(composition=(entry("norms.rms", ("trainer_fwd",), constants={"row_tile": True}, impl=impl("x")),))
    assert [change.path for change in c.differences(one, two).changes] == [
        "composition/norms.rms/trainer_fwd/constants/row_tile",
        "composition/norms.rms/trainer_fwd/impl/id",
    ]


def test_a_widened_claim_is_shown():
    doc = sample()
    wider = [claim.evolve(degrees=(1, 2, 4, 8, 16)) if claim.axis == "tp" else claim for claim in doc.topology]
    (change,) = c.differences(doc, doc.evolve(topology=wider)).changes
    assert change.path == "topology/tp/degrees" and change.after == [1, 2, 4, 8, 16] and change.moves == ()
