import random

import pytest
from contract_samples import ALL_CASES, constants, contracts, deployments, entry, impl, sample, sha, unsealed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import contract as c

slow_build = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)


def moved(before: c.Contract, after: c.Contract) -> set[str]:
    old, new = c.recompute(before), c.recompute(after)
    return {name for name in c.Identities.model_fields if getattr(old, name) != getattr(new, name)}


def shuffled(doc: c.Contract, seed: int) -> c.Contract:
    """The same statements in another order, with entries cut into one per case."""
    rng = random.Random(seed)
    singles = [held.evolve(cases=(case,)) for _, case, held in doc.owners()]
    parts = {"cases": list(doc.cases), "composition": singles, "topology": list(doc.topology)}
    for part in parts.values():
        rng.shuffle(part)
    keys = list(doc.deployment)
    rng.shuffle(keys)
    return doc.evolve(**parts, deployment={key: doc.deployment[key] for key in keys})


@slow_build
@given(contracts(), st.integers(0, 99))
def test_order_and_grouping_move_nothing(doc, seed):
    assert moved(doc, shuffled(doc, seed)) == set()
    assert c.recompute(doc) == c.recompute(c.seal(doc)) == c.seal(doc).identities


@slow_build
@given(contracts(), st.integers(0, 99))
def test_seal_is_idempotent_and_blind_to_order(doc, seed):
    parts = {name: list(getattr(doc, name)) for name in ("cases", "composition", "topology")}
    for part in parts.values():
        random.Random(seed).shuffle(part)
    assert c.seal(doc) == c.seal(c.seal(doc)) == c.seal(doc.evolve(**parts))


@given(deployments, deployments)
def test_deployment_moves_only_itself(one, other):
    before, after = unsealed(deployment=one), unsealed(deployment=other)
    assert moved(before, after) == (set() if c.FrozenMap(one) == c.FrozenMap(other) else {"deployment"})


@given(constants, constants)
def test_constants_move_the_policy_exactly_when_their_bits_differ(one, other):
    one, other = c.Constants.of(one), c.Constants.of(other)
    docs = [unsealed(composition=(entry("norms.rms", constants=held),)) for held in (one, other)]
    assert moved(*docs) == (set() if one.plain() == other.plain() and one == other else {"numerical_policy"})


@pytest.mark.parametrize("one, other", [(0.0, -0.0), (1, True), (1.0, 1), (float("nan"), -float("nan")), (0, None)])
def test_python_equal_constants_still_differ(one, other):
    docs = [unsealed(composition=(entry("norms.rms", constants=c.Constants.of({"k": k})),)) for k in (one, other)]
    assert moved(*docs) == {"numerical_policy"}


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"impl": impl("other")}, {"numerical_policy"}),
        ({"impl": impl("norms.rms", 2)}, {"numerical_policy"}),
        ({"impl": impl("norms.rms", 1, "sm90")}, {"numerical_policy"}),
        ({"artifact": sha("other")}, {"numerical_policy"}),
        ({"artifact": None}, {"numerical_policy"}),
        ({"constants": {"row_tile": 64}}, {"numerical_policy"}),
        ({"region": "norms.add_rms"}, {"semantic", "numerical_policy"}),
        ({"cases": ("trainer_fwd",)}, {"numerical_policy"}),
        ({"discharge": {"kind": "gate", "ref": "x"}}, set()),
        ({"route": "native"}, set()),
    ],
)
def test_what_a_change_of_one_entry_moves(change, expected):
    before = unsealed(composition=(entry("norms.rms"),))
    assert moved(before, unsealed(composition=(entry("norms.rms").evolve(**change),))) == expected


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"name": "other"}, set()),
        ({"model_family": "moe"}, {"semantic"}),
        ({"arch": "sm90"}, {"numerical_policy"}),
        ({"cases": tuple(c.CASES[id] for id in ALL_CASES[:4])}, {"semantic"}),
        ({"toolchain": {"jax": "0.11.2", "jaxlib": "0.11.3"}}, {"numerical_policy"}),
        ({"toolchain": {"jax": "0.11.2"}}, {"numerical_policy"}),
        ({"topology": ()}, {"numerical_policy"}),  # it held a pinned axis
        ({"state": ()}, set()),
    ],
)
def test_what_a_change_of_the_document_moves(change, expected):
    assert moved(unsealed(), unsealed(**change)) == expected


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"degrees": (2,)}, {"numerical_policy"}),
        ({"plan": "other"}, {"numerical_policy"}),
        ({"axis": "ep"}, {"numerical_policy"}),
        ({"kind": "invariant"}, {"numerical_policy"}),
        ({"domain": "words"}, set()),
    ],
)
def test_what_a_pinned_claim_moves(change, expected):
    claim = c.TopologyClaim(axis="pp", kind="pinned", degrees=(1,), plan="one stage")
    assert moved(unsealed(topology=(claim,)), unsealed(topology=(claim.evolve(**change),))) == expected


def test_an_invariant_claim_moves_nothing_but_breaks_the_seal():
    doc = sample()
    wider = [claim.evolve(degrees=(*claim.degrees, 16)) if claim.axis == "tp" else claim for claim in doc.topology]
    assert moved(doc, doc.evolve(topology=wider)) == set()
    assert c.seal(doc.evolve(topology=wider)).seal != doc.seal


def test_the_three_digests_never_coincide():
    held = c.recompute(unsealed())
    assert len({held.semantic, held.numerical_policy, held.deployment}) == 3


def test_digests_of_a_fixed_document_do_not_drift():
    """A change here rotates every contract in the field: bump the version inside the digests' bytes and say so."""
    assert sample().identities == c.Identities(semantic=GOLDEN[0], numerical_policy=GOLDEN[1], deployment=GOLDEN[2])


GOLDEN = (
    "0396f170600104f96af403513ac4abe67c96496b1ed468ebb83e378a54514783",
    "692fdb70c8a250b3c933fc2ad589d92f2ee6cce37b0f7a2c54fd72194fe4a1ac",
    "0716d03e8d0981d00a1916223ae4f7c4ee2e0f3e0bbc2f1bbd60742ecb41754d",
)
