.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo playground test check format bench proto pictures soak manifests deploy undeploy clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  \033[36m%-12s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv with everything in it, and .venv/bin/mgpu

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: install ## Run sample pods through the whole chain on a one-machine cluster and show the cards
	@$(BIN)/mgpu demo

playground: install ## Keep the one-machine cluster up for kubectl, until Ctrl-C
	@$(BIN)/mgpu playground

test: install ## Run the tests, three files at a time
	$(BIN)/python -m pytest -n 3 --dist loadfile

soak: install ## Run every property test and state machine with 20,000 examples (hours)
	MGPU_TEST_EXAMPLES=soak $(BIN)/python -m pytest -m hypothesis

check: install ## Format, lint, types, layers, generated code up to date
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy mgpu webhook scheduler deviceplugin playground proto tests bench
	$(BIN)/lint-imports --no-cache
	$(BIN)/python proto/generate.py --check

format: install ## Rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install ## Measure, with the machine named
	$(BIN)/python -m bench

pictures: install ## Make the pictures of docs/ anew, with an installed chromium
	$(BIN)/python docs/pictures/make.py

proto: install ## Regenerate the gRPC modules from proto/*.proto
	$(BIN)/python proto/generate.py

manifests: install ## Render every overlay and check what comes out
	$(BIN)/python -m pytest tests/manifests

deploy: ## Put mgpu on kubectl's cluster: OVERLAY=manifests/overlays/example IMAGE=name:tag
	@OVERLAY='$(OVERLAY)' IMAGE='$(IMAGE)' manifests/deploy.sh "$${OVERLAY:-manifests/base}"

undeploy: ## Take mgpu off kubectl's cluster; nothing stays stuck
	@manifests/undeploy.sh

clean: ## Remove what was installed and built
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
