"""The locked versions of all libraries, by hash, and the check that they satisfy pyproject.toml."""
