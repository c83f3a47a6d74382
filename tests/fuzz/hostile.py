"""Pods that are as large as the API server accepts, each in another way."""

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from mgpu.model import budget, pod_constraints
from tests.builders import CORE, MEMORY, container, pod

Raw = dict[str, Any]
Make = Callable[[int], Raw]


def filled(size: int, one: Callable[[int], Any]) -> list[Any]:
    """Return as many of these as fit into `size` bytes."""
    length = sum(len(orjson.dumps(one(100_000 + i))) + 1 for i in range(16)) / 16
    return [one(i) for i in range(int(size / length))]


def keyed(size: int, one: Callable[[int], tuple[str, Any]]) -> dict[str, Any]:
    """Return an object with as many of these entries as fit into `size` bytes."""
    length = len(orjson.dumps(dict([one(100_000)])))
    return dict(one(i) for i in range(int(size / length)))


def asking(name: str, resource: str, amount: str = "1") -> Raw:
    return {"name": name, "resources": {"limits": {resource: amount}}}


def _each(resource: str, amount: str = "1") -> Make:
    return lambda size: pod("p", *filled(size, lambda i: asking(f"c{i}", resource, amount)))


def _with(**annotations: str) -> Raw:
    return pod("p", container("c", 50, 1024), annotations=annotations)


def _annotated(size: int, form: str) -> Raw:
    return _with(**keyed(size, lambda i: (form.format(i), "1")))


def ordinary(size: int) -> Raw:
    """Return an ordinary pod of this size, with which the others are compared."""

    def one(i: int) -> Raw:
        env = [{"name": f"VAR_{j}", "value": f"value {j}"} for j in range(20)]
        return {**container(f"c{i}", 50, 1024), "image": "cuda", "env": env, "command": ["python", "-m", "train"]}

    return pod("p", *filled(size, one))


def _widest(size: int, *resources: str) -> Raw:
    """Return a pod with as many containers as admission accepts; variables fill the rest of the size."""
    env = filled(max(0, size // budget.MAX_CONTAINERS - 200), lambda i: {"name": f"V{i}"})
    amounts = dict.fromkeys(resources, "60")
    one = {
        "resources": {"limits": amounts, "requests": amounts},
        "env": env[: budget.MAX_VARIABLES // budget.MAX_CONTAINERS],
    }
    return pod("p", *({"name": f"c{i}", **one} for i in range(budget.MAX_CONTAINERS)))


PODS: Mapping[str, Make] = {
    "MIG slices": _each("nvidia.com/mig-1g.10gb"),
    "MPS slices": _each("nvidia.com/gpu-4gb"),
    "mgpu shares": _each(CORE, "100"),
    "mgpu quantities that are none": _each(CORE, "x"),
    "gpushare memory": _each("aliyun.com/gpu-mem"),
    "koordinator cards": _each("koordinator.sh/gpu", "50"),
    "koordinator odd names": lambda size: pod(
        "p", {"name": "c", "resources": {"limits": keyed(size, lambda i: (f"koordinator.sh/gpu{i}", "1"))}}
    ),
    "koordinator types": lambda size: pod(
        "p", {"name": "c", "resources": {"limits": keyed(size, lambda i: (f"koordinator.sh/t{i}", "100"))}}
    ),
    "containers of one name": lambda size: pod("p", *filled(size, lambda _: asking("c", CORE, "50"))),
    "numbers for containers": lambda size: pod("p", *filled(size, lambda i: i)),
    "init containers": lambda size: pod(
        "p", container("c", 50, 1024), init=tuple(filled(size, lambda i: asking(f"i{i}", CORE, "100")))
    ),
    "visible devices": lambda size: pod(
        "p", {**container("c", 50, 1024), "env": filled(size, lambda _: {"name": "NVIDIA_VISIBLE_DEVICES"})}
    ),
    "numbers for variables": lambda size: pod("p", {**container("c", 50, 1024), "env": filled(size, lambda i: i)}),
    "placement annotations": lambda size: _annotated(size, "vke.volcengine.com/gpu-index-container-{}"),
    "annotations like wishes": lambda size: _annotated(size, "mgpu.io/card-model{}"),
    "other annotations": lambda size: _annotated(size, "a{}"),
    "annotations of MtgpuPods": lambda size: _annotated(size, "lsalab.nthu/{}"),
    "cards of containers": lambda size: _with(**{"vke.volcengine.com/container-multiple-gpu": "1," * (size // 2)}),
    "card UUIDs": lambda size: _with(**{"mgpu.io/card-uuids": "G," * (size // 2)}),
    "card models": lambda size: _with(
        **{f"mgpu.io/{key}card-models": ",".join(["a " * (size // 200)] * 50) for key in ("", "exclude-")}
    ),
    "as many wishes as are accepted": lambda _: _with(
        **{
            f"mgpu.io/{key}": ",".join(f"{key[0]}{i}" + "-a" * 60 for i in range(pod_constraints.MAX_ENTRIES))
            for key in ("card-models", "exclude-card-models", "card-uuids")
        }
    ),
    "a long quantity": lambda size: pod("p", asking("c", CORE, "9" * size)),
    "a long resource": lambda size: pod("p", asking("c", "koordinator.sh/gpu" + "x" * size)),
    "a long container name": lambda size: pod("p", asking("c" * size, MEMORY)),
    "a long policy": lambda size: _with(**{"mgpu.io/card-policy": "x" * size}),
    "as many containers as are accepted": lambda size: _widest(size, "nvidia.com/mig-1g.10gb"),
    "as many containers with several resources": lambda size: _widest(
        size, "koordinator.sh/gpu-core", "koordinator.sh/gpu-memory-ratio", "koordinator.sh/rdma", "koordinator.sh/gpu1"
    ),
    "as many containers with shares": lambda size: _widest(size, CORE, MEMORY),
    "as many amounts as are accepted": lambda _: pod(
        "p",
        {"name": "c", "resources": {"limits": {f"koordinator.sh/gpu{i}": "1" for i in range(budget.MAX_RESOURCES)}}},
    ),
    "as many annotations as are accepted": lambda _: _with(
        **{f"mgpu.io/card-modelx{i}": "1" for i in range(budget.MAX_ANNOTATIONS)}
    ),
    "empty objects": lambda size: {**_with(), "spec": {**_with()["spec"], "volumes": [{}] * (size // 3)}},
}

OF_ONE_SIZE = (
    "as many wishes as are accepted",
    "as many amounts as are accepted",
    "as many annotations as are accepted",
)
"""Those that are the same for every size, so that nothing can grow."""


def mixed(*pods: Raw) -> Raw:
    """One pod with what all of these have."""
    found = pod("p")
    for one in pods:
        found["metadata"]["annotations"] = {
            **found["metadata"].get("annotations", {}),
            **one["metadata"].get("annotations", {}),
        }
        for key, value in one["spec"].items():
            kept = found["spec"].get(key)
            found["spec"][key] = [*kept, *value] if isinstance(kept, list) else value
    return found


def changed(raw: Raw, size: int) -> Raw:
    """The pod with as many more annotations of each kind as fit."""
    keys = ("vke.volcengine.com/gpu-index-container-{}", "mgpu.io/card-model{}", "lsalab.nthu/{}", "a{}")
    more: dict[str, str] = {}
    for key in keys:
        more |= keyed(size // len(keys), lambda i, key=key: (key.format(i), "1"))  # type: ignore[misc]
    more |= {"vke.volcengine.com/container-multiple-gpu": "1," * 500, "mgpu.io/card-policy": "spread"}
    return {**raw, "metadata": {**raw["metadata"], "annotations": more}}
