"""Lists what of mgpu and of the locked libraries is in the image.

A file of a library is either left out or installed as it is in its wheel, so the hashes in RECORD stay valid.
`tests/manifests/test_image.py` imports all modules of mgpu without what is left out.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase

PACKAGES = ("mgpu", "webhook", "scheduler", "deviceplugin", "proto")
PROJECT_FILES = ("pyproject.toml", "setup.py", "README.md")
UNUSED_LIBRARIES = (
    "aiohappyeyeballs",
    "aiohttp",
    "aiohttp-retry",
    "aiosignal",
    "attrs",
    "frozenlist",
    "multidict",
    "propcache",
    "yarl",
)
"""Libraries that only `kubernetes.aio` imports, which mgpu does not use. Scanners often report aiohttp."""
LEFT_OUT = (
    "*/tests/*",
    "*_test.py",
    "*.pyi",  # for type checkers
    "*.[ach]",  # for compilers
    "*.px[di]",
    "*.pyx",
    "cel_expr_python/ext/ext_encoders.*",  # 18 MB; the selectors of Kubernetes need only the other three extensions
    "cel_expr_python/ext/ext_math.*",
    "cel_expr_python/ext/ext_proto.*",
    "kubernetes/aio/*",  # 35 MB
    "kubernetes/client/api/*_api.py",  # 33 MB with the models; mgpu reads and writes raw JSON
    "kubernetes/client/models/[a-z]*.py",
    "example.py",  # of nvidia-ml-py
    "numpy/_pyinstaller/*",
    "numpy/distutils/*",
    "numpy/f2py/*",
)
"""Patterns of paths in `site-packages`. Licences are nowhere left out."""


def is_left_out(path: str) -> bool:
    """Return whether a file of a library is left out.

    Args:
        path: its path in `site-packages`, with slashes.
    """
    folder = path.partition("/")[0]
    return not folder.endswith(".dist-info") and any(fnmatchcase(path, pattern) for pattern in LEFT_OUT)


def find_unused_rules(paths: Iterator[str]) -> set[str]:
    """Return the patterns of `LEFT_OUT` that match none of the paths."""
    rules = set(LEFT_OUT)
    for path in paths:
        rules -= {pattern for pattern in rules if fnmatchcase(path, pattern)}
    return rules
