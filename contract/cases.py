"""The project's cases. A case id has one meaning everywhere; `validate` refuses a contract that redefines one."""

from __future__ import annotations

from types import MappingProxyType

from contract.schema import CaseId, ExecutionCase, Role


def _case(id: CaseId, role: Role, *, grad: bool = False, state: str = "none") -> ExecutionCase:
    fields = {"id": id, "runtime_role": role, "grad_mode": "grad" if grad else "no_grad", "state_mode": state}
    return ExecutionCase.model_validate(fields)


TRAINER_FWD = _case("trainer_fwd", "trainer", grad=True)
TRAINER_SCORE = _case("trainer_score", "trainer")
ENGINE_PREFILL = _case("engine_prefill", "engine", state="prefill")
ENGINE_DECODE = _case("engine_decode", "engine", state="decode")
JAX_REFERENCE = _case("jax_reference", "reference")

CASES = MappingProxyType(
    {case.id: case for case in (TRAINER_FWD, TRAINER_SCORE, ENGINE_PREFILL, ENGINE_DECODE, JAX_REFERENCE)}
)
