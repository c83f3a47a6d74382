"""Strategies for arbitrary JSON, with the keys of Kubernetes objects among others. Property tests use it."""

from hypothesis import strategies as st

from tests.builders import CORE, MEMORY

_WORDS = ["metadata", "annotations", "spec", "containers", "initContainers", "resources", "requests", "limits", "env"]
_FIELDS = ["request", "uid", "object", "oldObject", "kind", "userInfo", "operation", "name", "status"]
_VERBS = ["Pod", "NodeNames", "Nodes", "items", "Node", "PodName", "PodUID", "NodeNameToVictims", "Pods", "target"]
_KEYS = st.sampled_from([*_WORDS, *_FIELDS, *_VERBS, CORE, MEMORY]) | st.text(max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=5),
    max_leaves=25,
)
PARTS = st.fixed_dictionaries({}, optional={"metadata": JSON, "spec": JSON, "status": JSON})
"""Objects with valid top-level keys. Arbitrary JSON alone rarely has any of the fields that are read."""
