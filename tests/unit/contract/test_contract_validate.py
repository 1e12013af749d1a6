import pytest
from contract_samples import ALL_CASES, ENGINE, TRAINER_SIDE, entry, impl, native_sample, sample, sha, unsealed

import contract as c


def rules(doc: c.Contract, *, sealed: bool = True) -> set[str]:
    with pytest.raises(c.ContractError) as caught:
        c.validate(c.seal(doc) if sealed else doc)
    for finding in caught.value.findings:
        assert all((finding.entry, finding.rule, finding.given, finding.allowed, finding.mend)), finding
    return set(caught.value.rules)


def with_entries(*entries: c.CompositionEntry) -> c.Contract:
    return unsealed(composition=entries)


def with_claim(**claim) -> c.Contract:
    return unsealed(topology=({"axis": "tp", "kind": "invariant", "degrees": (1, 2), **claim},))


def with_tolerance(**change) -> c.Contract:
    doc = native_sample()
    return doc.evolve(tolerance=[doc.tolerance[0].evolve(**change)])


def test_samples_are_valid():
    assert c.validate(sample()) == sample()
    assert c.validate(native_sample())


def test_all_findings_come_at_once():
    broken = with_entries(entry("norms.rms", artifact=None), entry("linear.row", impl=impl("x", arch="sm90")))
    assert rules(broken.evolve(state=[{"state_id": "kv", "invalidated_by": (), "replay_safe": False, "ref": "r"}])) == {
        "artifact",
        "one-arch",
        "state-invalidation",
    }


def test_unique_cases():
    doc = unsealed()
    assert rules(doc.evolve(cases=(*doc.cases, doc.cases[0]))) == {"case-unique"}


def test_a_case_keeps_its_meaning():
    scored = c.CASES["trainer_fwd"].evolve(grad_mode="no_grad")
    doc = unsealed()
    cases = [scored if case.id == "trainer_fwd" else case for case in doc.cases]
    assert rules(doc.evolve(cases=cases)) == {"case-meaning"}


def test_a_declared_case_is_covered():
    cut = with_entries(entry("norms.rms", ENGINE, discharge={"kind": "gate", "ref": "g"}))
    assert rules(cut) == {"case-covered"}


def test_an_empty_contract_is_refused():
    assert rules(unsealed(composition=(), cases=())) == {"not-empty"}


@pytest.mark.parametrize("part", ["cases", "composition", "topology"])
def test_order(part):
    doc = sample()
    assert rules(doc.evolve(**{part: tuple(reversed(getattr(doc, part)))}), sealed=False) == {"sorted"}


@pytest.mark.parametrize("part", ["state", "tolerance"])
def test_order_of_claims(part):
    doc = native_sample()
    other = {"state": {"state_id": "gdn"}, "tolerance": {"case_pair": ("engine_decode", "jax_reference")}}[part]
    held = getattr(doc, part)[0]
    both = c.seal(doc.evolve(**{part: (held, held.evolve(**other))}))
    assert c.validate(both)
    assert rules(both.evolve(**{part: tuple(reversed(getattr(both, part)))}), sealed=False) == {"sorted"}


def test_one_owner():
    twice = with_entries(entry("norms.rms"), entry("norms.rms", ENGINE))
    assert rules(twice) == {"one-owner"}
    assert c.validate(c.seal(with_entries(entry("norms.rms", TRAINER_SIDE), entry("norms.rms", ENGINE))))


def test_an_entry_owns_declared_cases_once():
    assert "entry-cases" in rules(with_entries(entry("norms.rms"), entry("linear.row", ())))
    assert rules(with_entries(entry("norms.rms", (*ALL_CASES, "trainer_score")))) == {"entry-cases"}
    fewer = tuple(c.CASES[id] for id in TRAINER_SIDE)
    assert rules(with_entries(entry("norms.rms")).evolve(cases=fewer)) == {"case-declared"}
    backwards = sample(composition=(entry("norms.rms"),))
    backwards = backwards.evolve(composition=[entry("norms.rms", tuple(reversed(ALL_CASES)))])
    assert rules(backwards, sealed=False) == {"entry-cases"}


def test_one_arch():
    assert rules(with_entries(entry("norms.rms", impl=impl("x", arch="sm90")))) == {"one-arch"}
    assert rules(unsealed(arch="sm90")) == {"one-arch"}


def test_a_composition_defining_entry_needs_an_artifact():
    assert rules(with_entries(entry("norms.rms", artifact=None))) == {"artifact"}


@pytest.mark.parametrize("package", ["jax", "jaxlib"])
def test_toolchain(package):
    held = {key: value for key, value in unsealed().toolchain.items() if key != package}
    assert rules(unsealed(toolchain=held)) == {"toolchain"}


def test_a_native_entry_needs_a_tolerance_claim():
    doc = native_sample()
    assert rules(doc.evolve(tolerance=())) == {"native-tolerance", "discharge-tolerance"}
    assert "native-tolerance" in rules(doc.evolve(tolerance=[doc.tolerance[0].evolve(attributed_to=("linear.row",))]))


@pytest.mark.parametrize(
    "change",
    [{"impl": impl("other")}, {"constants": {"row_tile": 1}}, {"artifact": sha("other")}],
    ids=lambda c: str(*c),
)
@pytest.mark.parametrize("apart", [(ENGINE, TRAINER_SIDE), (("engine_decode",), tuple(ALL_CASES[1:]))])
def test_entries_that_differ_need_a_discharge(change, apart):
    one, other = (entry("norms.rms", cases) for cases in apart)
    assert rules(with_entries(one, other.evolve(**change))) == {"discharge"}
    gate = {"kind": "gate", "ref": "report 3"}
    assert c.validate(c.seal(with_entries(one, other.evolve(**change, discharge=gate))))
    assert c.validate(c.seal(with_entries(one.evolve(discharge=gate), other.evolve(**change))))


def test_each_pair_that_differs_needs_its_own_discharge():
    cuts = [("engine_decode",), ("engine_prefill",), TRAINER_SIDE]
    gate = {"kind": "gate", "ref": "report 3"}
    three = [entry("norms.rms", cases, artifact=sha(str(cases))) for cases in cuts]
    assert rules(with_entries(three[0].evolve(discharge=gate), *three[1:])) == {"discharge"}
    assert c.validate(c.seal(with_entries(*(held.evolve(discharge=gate) for held in three[:2]), three[2])))


def test_the_finding_names_cases_and_fields():
    doc = with_entries(entry("norms.rms", ENGINE), entry("norms.rms", TRAINER_SIDE, impl=impl("other")))
    with pytest.raises(c.ContractError) as caught:
        c.validate(c.seal(doc))
    (finding,) = caught.value.findings
    assert "norms.rms" in finding.entry and "engine_decode" in finding.given and "impl" in finding.given


def test_a_region_absent_from_a_case_needs_a_discharge():
    only_engine = entry("head.sample", ENGINE)
    assert rules(with_entries(only_engine, entry("norms.rms"))) == {"discharge"}
    kept = only_engine.evolve(discharge={"kind": "neutral", "ref": "draws tokens from given logits"})
    assert c.validate(c.seal(with_entries(kept, entry("norms.rms"))))


def test_a_discharge_by_tolerance_needs_its_claim():
    loose = entry("norms.rms", ENGINE, artifact=sha("x"), discharge={"kind": "tolerance", "ref": "r"})
    assert rules(with_entries(loose, entry("norms.rms", TRAINER_SIDE))) == {"discharge-tolerance"}


def test_axes_are_unique():
    claim = {"axis": "tp", "kind": "invariant", "degrees": (1,), "domain": "d", "proof": "p"}
    assert rules(unsealed(topology=(claim, claim))) == {"axis-unique"}


@pytest.mark.parametrize("blank", [None, "", "  "])
def test_claims_carry_what_shows_them(blank):
    assert rules(with_claim(domain=blank, proof="p")) == {"invariant-domain"}
    assert rules(with_claim(domain="d", proof=blank)) == {"invariant-proof"}
    assert rules(with_claim(kind="pinned", degrees=(2,), plan=blank)) == {"pinned-plan"}
    assert c.validate(c.seal(with_claim(domain="d", proof="p")))
    assert c.validate(c.seal(with_claim(kind="pinned", degrees=(2,), plan="p")))


def test_degrees_of_a_claim():
    assert rules(with_claim(kind="pinned", plan="p")) == {"pinned-degree"}
    assert rules(with_claim(kind="pinned", plan="p", degrees=())) == {"degrees"}
    assert rules(with_claim(domain="d", proof="p", degrees=())) == {"degrees"}
    assert rules(with_claim(domain="d", proof="p", degrees=(0, 1))) == {"degrees"}
    assert rules(with_claim(domain="d", proof="p", degrees=(1, 1))) == {"degrees"}
    assert rules(with_claim(axis="sp", domain="d", proof="p", degrees=(1, 2))) == {"degrees"}
    backwards = sample().evolve(topology=with_claim(domain="d", proof="p", degrees=(2, 1)).topology)
    assert "degrees" in rules(backwards, sealed=False)


def test_state_claims():
    held = unsealed().state[0]
    assert rules(unsealed(state=(held, held))) == {"state-unique"}
    assert rules(unsealed(state=(held.evolve(invalidated_by=()),))) == {"state-invalidation"}
    assert rules(unsealed(state=(held.evolve(invalidated_by=("a", "a")),))) == {"state-invalidation"}


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"case_pair": ("engine_decode", "engine_decode")}, "tolerance-pair"),
        ({"bounds": {}}, "tolerance-bounds"),
        ({"measured_in": " "}, "tolerance-measured"),
        ({"attributed_to": ()}, "tolerance-attributed"),
        ({"attributed_to": ("norms.rms", "norms.rms")}, "tolerance-attributed"),
        ({"attributed_to": ("norms.other", "norms.rms")}, "tolerance-attributed"),
    ],
)
def test_tolerance_claims(change, rule):
    assert rule in rules(with_tolerance(**change))


def test_tolerance_pairs_are_unique_sorted_and_declared():
    doc = native_sample()
    assert rules(doc.evolve(tolerance=doc.tolerance * 2)) == {"tolerance-unique"}
    swapped = doc.evolve(tolerance=[doc.tolerance[0].evolve(case_pair=("trainer_fwd", "engine_decode"))])
    assert rules(swapped, sealed=False) == {"tolerance-pair"}
    claim = doc.tolerance[0].evolve(case_pair=("engine_decode", "jax_reference"))
    entries = (entry("norms.rms", (*ENGINE, "trainer_fwd")),)
    cases = tuple(c.CASES[id] for id in (*ENGINE, "trainer_fwd"))
    assert rules(unsealed(cases=cases, composition=entries, tolerance=(claim,))) == {"tolerance-pair"}


def test_an_unsealed_contract_is_refused():
    assert rules(unsealed(), sealed=False) == {"sealed"}
    assert rules(sample().evolve(seal=None), sealed=False) == {"sealed"}


@pytest.mark.parametrize("name", ["semantic", "numerical_policy", "deployment"])
def test_stored_identities_equal_recomputed_ones(name):
    doc = sample()
    assert doc.identities
    assert rules(doc.evolve(identities=doc.identities.evolve(**{name: "0" * 64})), sealed=False) == {"identities"}


def test_an_edit_that_moves_no_identity_still_shows():
    assert rules(sample().evolve(name="other"), sealed=False) == {"identities"}


@pytest.mark.parametrize(
    "data", [[], "x", None, {}, {"schema_version": 2}, {"schema_version": True}, {"schema_version": "1"}]
)
def test_parse_refuses_what_is_no_contract(data):
    with pytest.raises(c.ContractError) as caught:
        c.parse(data)
    assert set(caught.value.rules) <= {"schema", "schema-version"}
    assert c.parse(sample().plain()) == sample()
