"""Configures Sphinx, which builds the documentation as a site (`make docs`).

The source directory is the root of the repository, because pages link to README.md, CONTRIBUTING.md and others there.
README.md is the first page of the site. Sphinx needs a table of contents, which would be noise where README.md is read
as a file, so it is in contents.md and is appended to README.md while Sphinx reads it.
"""

import shutil
from importlib.metadata import version as version_of
from pathlib import Path

from sphinx.application import Sphinx

project = "mgpu"
release = version = version_of("mgpu")
author = "the authors of mgpu"

root_doc = "README"
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = ["docs/site/**"]
extensions = ["myst_parser", "sphinx_copybutton"]
nitpicky = True
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"mgpu {release}"
html_copy_source = False
html_show_copyright = False


def _append_contents(_app: Sphinx, name: str, source: list[str]) -> None:
    if name == root_doc:
        source[0] += "\n" + (Path(__file__).parent / "contents.md").read_text()


def _write_index(app: Sphinx, error: Exception | None) -> None:
    """Web servers show index.html first."""
    if error is None:
        shutil.copy(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", _append_contents)
    app.connect("build-finished", _write_index)
