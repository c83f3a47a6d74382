"""Tells from which git commit this mgpu was built. `setup.py` also uses this module, so it imports nothing of mgpu.

The commit is not a part of the version: the processes and commands compare their versions with each other, and versions
are values of labels, which may not contain the "+" of a local version (PEP 440).
"""

import subprocess
from pathlib import Path

FILE = "commit.txt"
"""The file that a build writes into the package `mgpu`. A checkout does not have it."""
VARIABLE = "MGPU_COMMIT"
"""The environment variable that tells the commit to a build whose sources are not a checkout, as in the Dockerfile."""
_SECONDS = 10


def describe_build() -> str:
    """Return what `mgpu --version` shows after the version."""
    folder = Path(__file__).parent
    try:
        return f"commit {(folder / FILE).read_text().strip() or 'unknown'}"
    except FileNotFoundError:
        return f"development, commit {read_commit(folder.parent) or 'unknown'}"


def read_commit(root: Path) -> str | None:
    """Return the abbreviated commit of a checkout, with "-dirty" if files differ from it, or None if git cannot tell.

    Sources without .git may lie in another project's checkout, whose commit git would return.
    """
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
