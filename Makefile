.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.demo
# Programs for the tests of manifests/, of exact versions, whose hashes Go's checksum database has.
TOOLS := .tools
HELM := helm.sh/helm/v3/cmd/helm@v3.22.0
KUSTOMIZE := sigs.k8s.io/kustomize/kustomize/v5@v5.8.1
GO ?= $(or $(shell command -v go),/usr/local/go/bin/go)
UV := $(BIN)/uv
LOCKS := $(wildcard requirements/*.txt)
# What requirements/$(1).txt lists, by hash, and mgpu itself from this checkout.
sync = $(UV) pip install --quiet --python $(BIN)/python --require-hashes -r requirements/build.txt -r requirements/$(1).txt && \
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--no-emit-find-links --custom-compile-command 'make lock' $(UPGRADE)

.PHONY: help install demo playground test check lock format bench proto docs chart helm pictures soak manifests deploy undeploy clean
.PHONY: image image-archive sbom release

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  \033[36m%-12s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv with everything in it, and .venv/bin/mgpu

$(UV): requirements/uv.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
	@touch $@

$(STAMP): $(UV) pyproject.toml $(LOCKS)
	@$(call sync,dev)
	@touch $@

# Whoever has everything has what the demo needs.
$(DEMO): $(UV) pyproject.toml $(LOCKS)
	@test -e $(STAMP) && $(MAKE) --no-print-directory $(STAMP) || { $(call sync,demo); }
	@touch $@

demo: $(DEMO) ## Run sample pods through the whole chain on a one-machine cluster and show the cards
	@$(BIN)/mgpu demo

playground: $(DEMO) ## Keep the one-machine cluster up for kubectl, until Ctrl-C
	@$(BIN)/mgpu playground

test: install ## Run the tests, five files at a time
	$(BIN)/python -m pytest -n 5 --dist loadfile --no-loadscope-reorder

soak: install ## Run every property test and state machine with 20,000 examples, and the largest inputs (hours)
	MGPU_TEST_EXAMPLES=soak $(BIN)/python -m pytest -m "hypothesis or fuzz"

check: install ## Format, lint, types, layers, generated code and locked versions up to date
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy mgpu webhook scheduler deviceplugin playground proto tests bench requirements image krew release manifests/chart docs/site/commands.py
	$(BIN)/lint-imports --no-cache
	$(BIN)/python proto/generate.py --check
	$(BIN)/python manifests/chart/generate.py --check
	$(BIN)/python docs/site/commands.py --check
	$(BIN)/python requirements/check.py
	$(BIN)/python -m requirements.licences

lock: $(UV) ## Lock the versions and hashes of all libraries anew; UPGRADE=--upgrade takes the newest
	$(COMPILE) requirements/uv.in -o requirements/uv.txt
	$(COMPILE) pyproject.toml requirements/build.in --extra dev -o requirements/dev.txt
	$(COMPILE) requirements/build.in -c requirements/dev.txt -o requirements/build.txt
	$(COMPILE) pyproject.toml -c requirements/dev.txt -o requirements/runtime.txt
	$(COMPILE) pyproject.toml --extra playground -c requirements/dev.txt -o requirements/demo.txt
	$(COMPILE) pyproject.toml --extra docs -c requirements/dev.txt -o requirements/docs.txt

format: install ## Rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install ## Measure, print one table with the machine named, and keep the run in the history
	$(BIN)/python -m bench

docs: install ## Build the documentation as a site in build/site; a link that leads nowhere is an error
	@$(call sync,docs)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs/site . build/site
	@echo 'open build/site/index.html'

pictures: install ## Make the pictures of docs/ anew, with an installed chromium
	$(BIN)/python docs/pictures/make.py
	$(BIN)/python docs/pictures/performance.py

proto: install ## Regenerate the gRPC modules from proto/*.proto
	$(BIN)/python proto/generate.py

chart: install ## Generate the templates of the Helm chart from manifests/, and docs/chart.md from its values
	$(BIN)/python manifests/chart/generate.py

helm: $(TOOLS)/helm $(TOOLS)/kustomize ## Build Helm and kustomize in .tools, with which tests render the manifests (needs Go)

$(TOOLS)/helm: Makefile
	GOBIN=$(CURDIR)/$(TOOLS) $(GO) install $(HELM)
	@touch $@

$(TOOLS)/kustomize: Makefile
	GOBIN=$(CURDIR)/$(TOOLS) $(GO) install $(KUSTOMIZE)
	@touch $@

manifests: install ## Render every overlay and check what comes out
	$(BIN)/python -m pytest tests/manifests

image: ## Build the image with docker, podman or buildah: IMAGE=name:tag BASE=name:tag@sha256:…
	@image/build.sh '$(IMAGE)' '$(BASE)'

image-archive: install ## Write the image as a tar file without any of them: IMAGE, BASE, INTERPRETER, ARCHIVE
	$(if $(and $(IMAGE),$(BASE),$(INTERPRETER),$(ARCHIVE)),,$(error Set IMAGE, BASE, INTERPRETER and ARCHIVE: docs/install.md))
	@SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} $(BIN)/python -m image.archive \
		--name '$(IMAGE)' --interpreter '$(INTERPRETER)' '$(BASE)' '$(ARCHIVE)'

sbom: install ## Write what the image contains to build/sbom: CycloneDX, and a table of the licences
	@SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} $(BIN)/python -m requirements.sbom build/sbom

release: helm check test docs ## Check a commit that is to be released, and build its files in dist: URI=https://…
	$(BIN)/python -m release.check
	MGPU_RELEASE=1 $(BIN)/python -m pytest tests/e2e/test_skew.py
	$(BIN)/python -m release.build dist --uri '$(URI)'

deploy: ## Put mgpu on kubectl's cluster: OVERLAY=manifests/overlays/example IMAGE=name:tag
	@OVERLAY='$(OVERLAY)' IMAGE='$(IMAGE)' manifests/deploy.sh "$${OVERLAY:-manifests/base}"

undeploy: ## Take mgpu off kubectl's cluster; nothing stays stuck
	@manifests/undeploy.sh

clean: ## Remove what was installed and built
	rm -rf $(VENV) $(TOOLS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
