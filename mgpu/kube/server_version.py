"""The version of the API server, which `GET /version` returns to every authenticated user."""

import re
from collections.abc import Mapping
from typing import Any

PATH = "/version"
OLDEST_FOR_CLAIMS = (1, 35)
"""The oldest version on which claims for shares work.

In 1.34, kube-scheduler compares every card with the room of the first one in its ResourceSlice, so it uses no other
card when that one is full. It reads beyond the slice, and ends, if a claim requests more cards than the slice has
(kubernetes/kubernetes#133705, repaired in 1.35 only).
"""


def minor_version(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return major and minor version from the answer of `PATH`, or None if it has none."""
    found = re.match(r"v?(\d+)\.(\d+)", str(raw.get("gitVersion") or ""))
    return (int(found[1]), int(found[2])) if found else None
