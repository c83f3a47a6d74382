"""Pods of all vocabularies, and their holdings read from annotations without the code of mgpu's dialects."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mgpu.model.cards import Card
from mgpu.model.quantities import whole_bytes
from tests.builders import container, pod

Raw = dict[str, Any]
GIB = 1 << 30
INDEX = "vke.volcengine.com/gpu-index-container-"
GPUSHARE = "scheduler.framework.gpushare.allocation"
KOORDINATOR = "scheduling.koordinator.sh/device-allocated"


Key = tuple[str, int]
"""Of a device on a node: its type and index."""


class Use(NamedTuple):
    """Of one card: core in percent, memory in bytes, and in percent where a Koordinator pod has it."""

    core: int = 0
    memory: int = 0
    ratio: int = 0


@dataclass(frozen=True)
class Shape:
    """containers: of the pod, as a user writes them. cards: how many devices it gets in all.

    uses: container → what it gets of each of its cards; only for vocabularies that do not write amounts.
    """

    vocabulary: str
    containers: tuple[Raw, ...]
    cards: int = 1
    uses: Mapping[str, Callable[[Card], Use]] | None = None

    def pod(self, name: str, **more: Any) -> Raw:
        return pod(name, *json.loads(json.dumps(self.containers)), **more)


def asking(name: str = "c", **amounts: object) -> Raw:
    """`asking(gpu_mem=8)` as limits, with the vocabularies' own names."""
    resources = {_NAMES[key]: str(amount) for key, amount in amounts.items()}
    return {"name": name, "image": "cuda", "resources": {"requests": resources, "limits": dict(resources)}}


_NAMES = {
    "gpu_mem": "aliyun.com/gpu-mem",
    "nvidia": "nvidia.com/gpu",
    "gpu": "koordinator.sh/gpu",
    "core": "koordinator.sh/gpu-core",
    "memory": "koordinator.sh/gpu-memory",
    "ratio": "koordinator.sh/gpu-memory-ratio",
    "shared": "koordinator.sh/gpu.shared",
    "rdma": "koordinator.sh/rdma",
}


def _all(card: Card) -> Use:
    return Use(100, card.memory)


def _of(core: int, mib: int) -> Callable[[Card], Use]:
    return lambda _: Use(core, mib << 20)


SHAPES: dict[str, Shape] = {
    "mgpu share": Shape("mgpu", (container("c", 30, 4096),), uses={"c": _of(30, 4096)}),
    "mgpu memory": Shape("mgpu", (container("c", 5, 30 << 10),), uses={"c": _of(5, 30 << 10)}),
    "mgpu two": Shape(
        "mgpu", (container("a", 60, 1024), container("b", 50, 9000)), 2, {"a": _of(60, 1024), "b": _of(50, 9000)}
    ),
    "mgpu whole": Shape("mgpu", (container("c", 100),), uses={"c": _all}),
    "gpushare": Shape("gpushare", (asking(gpu_mem=9),)),
    "gpushare large": Shape("gpushare", (asking(gpu_mem=61),)),
    "gpushare two": Shape("gpushare", (asking("a", gpu_mem=40), asking("b", gpu_mem=33)), 2),
    "gpu": Shape("koordinator", (asking(gpu=25),)),
    "gpu 200": Shape("koordinator", (asking(gpu=200),), 2),
    "core and memory": Shape("koordinator", (asking(core=20, memory="4Gi"),)),
    # On a card of 46068 MiB three of them fit by bytes, and are 34 % each.
    "memory": Shape("koordinator", (asking(memory="16100000000"),)),
    "ratio": Shape("koordinator", (asking(ratio=33),)),
    "core and ratio": Shape("koordinator", (asking(core=10, ratio=70),)),
    "shared": Shape("koordinator", (asking(shared=2, core=100, ratio=40),), 2),
    "rdma": Shape("koordinator", (asking(rdma=40),)),
    "gpu and rdma": Shape("koordinator", (asking(gpu=20, rdma=70),), 2),
    "nvidia": Shape("koordinator", (asking(nvidia=1),)),
    "nvidia two": Shape("koordinator", (asking(nvidia=2),), 2),
}


def held(raw: Raw, shape: Shape, cards: tuple[Card, ...]) -> dict[Key, Use]:
    """Return what a bound pod holds of each device by its annotations; {} if it has no record."""
    annotations = raw["metadata"]["annotations"]
    total: dict[Key, Use] = defaultdict(Use)
    for key, use in _READERS[shape.vocabulary](annotations, shape, {(card.type, card.index): card for card in cards}):
        total[key] = Use(*(a + b for a, b in zip(total[key], use, strict=True)))
    return dict(total)


Cards = Mapping[Key, Card]
Found = list[tuple[Key, Use]]


def _mgpu(annotations: Mapping[str, str], shape: Shape, cards: Cards) -> Found:
    return [
        (("gpu", int(index)), use(cards["gpu", int(index)]))
        for name, use in (shape.uses or {}).items()
        for index in annotations.get(INDEX + name, "").split(",")
        if index
    ]


def _gpushare(annotations: Mapping[str, str], shape: Shape, cards: Cards) -> Found:  # noqa: ARG001
    rows = json.loads(annotations.get(GPUSHARE, "{}")).values()
    return [(("gpu", int(index)), Use(0, units * GIB)) for row in rows for index, units in row.items()]


def _koordinator(annotations: Mapping[str, str], shape: Shape, cards: Cards) -> Found:  # noqa: ARG001
    keys = {card.uuid: key for key, card in cards.items()}
    found = []
    for type, rows in json.loads(annotations.get(KOORDINATOR, "{}")).items():
        for row in rows:
            key, given = keys[row["id"]], row["resources"]
            assert (key[0], cards[key].minor) == (type, row["minor"])
            core = given.get(_NAMES["core" if type == "gpu" else type], "0")
            memory, ratio = (given.get(_NAMES[name], "0") for name in ("memory", "ratio"))
            found.append((key, Use(int(core), whole_bytes(memory), int(ratio))))
    return found


_READERS: dict[str, Callable[[Mapping[str, str], Shape, Cards], Found]] = {
    "mgpu": _mgpu,
    "gpushare": _gpushare,
    "koordinator": _koordinator,
}
