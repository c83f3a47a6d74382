"""The locked versions and hashes of all libraries, and the check that they satisfy pyproject.toml."""
