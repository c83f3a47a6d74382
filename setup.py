"""Adds to what pyproject.toml says: a build writes the git commit into the package `mgpu` (mgpu/commit.py)."""

import os
import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
COMMIT = runpy.run_path(str(ROOT / "mgpu/commit.py"))


class BuildWithCommit(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            commit = os.environ.get(COMMIT["VARIABLE"]) or COMMIT["read_commit"](ROOT) or "unknown"
            (Path(self.build_lib) / "mgpu" / COMMIT["FILE"]).write_text(commit + "\n")


setup(cmdclass={"build_py": BuildWithCommit})
