"""Checks names of Kubernetes' objects, before they become part of a path or of another name.

`scheduler.api.commands` checks the names in a request of a user, and `mgpu.dialects.mtgpu` the node of an MtgpuPod.
"""

import re

LONGEST_NAME = 253
_LONGEST_NAMESPACE = 63
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAMESPACE = re.compile(_LABEL, re.ASCII)
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*", re.ASCII)


def is_object_name(text: str) -> bool:
    """Return whether the text can be the name of a Pod, an MtgpuPod or a Node: a DNS subdomain (RFC 1123)."""
    return len(text) <= LONGEST_NAME and _NAME.fullmatch(text) is not None


def is_namespace_name(text: str) -> bool:
    """Return whether the text can be the name of a Namespace: a DNS label (RFC 1123)."""
    return len(text) <= _LONGEST_NAMESPACE and _NAMESPACE.fullmatch(text) is not None
