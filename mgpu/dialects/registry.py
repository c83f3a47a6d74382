"""All five vocabularies' resource names, known from the start, so that mixing them is denied always."""

import re

from mgpu.model.errors import Problem
from mgpu.model.pods import Pod

_NAMES = {
    "vke.volcengine.com/mgpu-core": "mgpu",
    "vke.volcengine.com/mgpu-memory": "mgpu",
    "aliyun.com/gpu-mem": "gpushare",
    "aliyun.com/gpu-count": "gpushare",
    "nvidia.com/gpu": "koordinator",
}
_SLICE = re.compile(r"nvidia\.com/(gpu-\d+[A-Za-z]*|mig-.+)", re.ASCII)
"""Misspelt ones too: the dialect denies them, which nobody else would."""
MTGPU = "lsalab.nthu/"
"""How the annotations of MtgpuPods begin; the Pods that are made for them have them too."""


def vocabulary_of(resource: str) -> str | None:
    """The dialect that a resource name belongs to; None: no GPU resource."""
    if resource in _NAMES:
        return _NAMES[resource]
    if resource.startswith("koordinator.sh/"):
        return "koordinator"
    return "slices" if resource.startswith("nvidia.com/") and _SLICE.fullmatch(resource) else None


def vocabularies(pod: Pod) -> dict[str, str]:
    """Each vocabulary that the pod uses, with the path of the first place where it does."""
    found: dict[str, str] = {}
    for container, resource in pod.resources():
        name, asked = vocabulary_of(resource), container.asked(resource)
        if name and asked:
            found.setdefault(name, asked[1])
    for key in pod.annotations:
        if key.startswith(MTGPU):
            found.setdefault("mtgpu", f"metadata.annotations[{key}]")
    return found


def mixing(pod: Pod) -> list[Problem]:
    """A problem at the first use of each further vocabulary of a pod that uses several."""
    (first, _), *others = list(vocabularies(pod).items()) or [("", "")]
    return [
        Problem(
            path,
            f"belongs to {name}, while the pod already asks for GPU as {first}; a pod uses one vocabulary",
        )
        for name, path in others
    ]
