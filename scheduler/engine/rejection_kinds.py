"""The kind of a refusal, of which there are few, by its text, of which there are many. Pure."""

import re

_KINDS = (
    ("gated", r"scheduling gates"),
    ("bindings-fail", r"bindings of this pod keep failing"),
    ("agent", r"mgpu agent.* is not ready"),
    ("core-and-memory", r"core (?:[\d.]+ percent )?short and memory|core and memory short"),
    ("core", r"core (?:[\d.]+ percent )?short"),
    ("memory", r"memory short|memory (?:ratio )?[\d.]+ \w+ short"),
    ("unhealthy", r"unhealthy"),
    ("mtgpupods", r"in use by MtgpuPods"),
    ("in-use", r"in use\b"),
    ("shares", r"no share left|holds \d+ of \d+ shares"),
    ("nvidia-plugin", r"NVIDIA's plugin"),
    ("slices", r"cards are (?:not )?cut|room for \d+ of|no way found for|insufficient slices"),
    ("no-device", r"the node has no cards|node \S+ has no |is made on node|asks for \d+ .*?, the node has"),
    ("wish", r"card-models|card-uuids|same-card-group|spread-group"),
    ("not-together", r"fits alone, but not all"),
    ("not-proven", r"is not proven"),
    ("node-label", r"node label"),
    ("other-device", r"[\d.]+ percent short"),
    ("bound-already", r"the pod is bound to|the pod has |the pod is gone"),
    ("unknown-node", r"is not known"),
)
_KIND = re.compile("|".join(f"(?P<k{i}>{pattern})" for i, (_, pattern) in enumerate(_KINDS)))

MALFORMED, OTHER = "malformed", "other"
ALL = (*(name for name, _ in _KINDS), MALFORMED, OTHER)


def kind_of(text: str) -> str:
    """Of a text with several reasons the first, which most cards have."""
    found = _KIND.search(text)
    return _KINDS[int(str(found.lastgroup)[1:])][0] if found else OTHER
