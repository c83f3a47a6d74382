"""What every dialect promises, as one `Case` per dialect; test_contract.py runs all of them over the registry.

A new dialect adds its module here: how its pods are built from an abstract wish, and what is malformed in its words.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from mgpu.dialects import gpushare
from mgpu.dialects import koordinator as koord
from mgpu.dialects import mgpu as mgpu_dialect
from mgpu.settings import Settings, load_settings
from tests.builders import CORE, MEMORY, container, pod

Raw = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """name: the dialect's. pods: random valid pods that ask in its vocabulary.

    equal: groups of pods that ask for the same. malformed: pod → the paths of its problems.
    settings: every mode in which records are written differently, by name. wishes: whether pods may have any.
    """

    name: str
    pods: st.SearchStrategy[Raw]
    equal: Mapping[str, tuple[Raw, ...]]
    malformed: Mapping[str, tuple[Raw, tuple[str, ...]]]
    settings: Mapping[str, Settings] = field(default_factory=lambda: {"default": load_settings("")})
    unreadable: Callable[[Mapping[str, str]], Mapping[str, str]] = dict
    constraints: bool = True


def resources(requests: Mapping[str, object] | None = None, limits: Mapping[str, object] | None = None) -> Raw:
    """A container whose requests and limits are given as they are."""
    given = {kind: dict(amounts) for kind, amounts in (("requests", requests), ("limits", limits)) if amounts}
    return {"name": "c", "image": "cuda", "resources": given}


@st.composite
def _mgpu_pods(draw: st.DrawFn) -> Raw:
    """Normal and multiple pods with init containers, sidecars and containers that ask for nothing."""
    multiple = draw(st.booleans())
    entries: list[int] = []

    def one(name: str, *, in_list: bool, **more: Any) -> Raw:
        kind = draw(st.sampled_from(["none", "share", "whole"]))
        count = draw(st.integers(1, 4)) if in_list or kind == "whole" else 1
        entries.append(0 if kind == "none" else count)
        if kind == "none":
            return container(name, **more)
        if kind == "whole":
            return container(name, 100 * count, **more)
        core, mib = draw(st.integers(1, 99)), draw(st.integers(256, 20_000))
        return container(name, core * count, mib * count, **more)

    init = tuple(
        one(f"i{i}", in_list=False, **({"restartPolicy": "Always"} if draw(st.booleans()) else {}))
        for i in range(draw(st.integers(0, 2)))
    )
    entries.clear()
    apps = [one(f"c{i}", in_list=multiple) for i in range(draw(st.integers(1, 3)))]
    apps[0] |= {"resources": container("x", 50 * (entries[0] or 1), 1024 * (entries[0] or 1))["resources"]}
    entries[0] = entries[0] or 1
    if not multiple:
        apps[0]["resources"] = container("x", 50, 1024)["resources"]
        return pod("p", *apps, init=init)
    annotations = {
        mgpu_dialect.MULTIPLE: ",".join(map(str, entries)),
        mgpu_dialect.COMPUTE_POLICY: "native-burst-share",
    }
    return pod("p", *apps, init=init, annotations=annotations)


_PATH = "spec.containers[0].resources"
_MULTIPLE = {mgpu_dialect.MULTIPLE: "2"}
_MULTIPLE_PATH = f"metadata.annotations[{mgpu_dialect.MULTIPLE}]"

MGPU = Case(
    name="mgpu",
    pods=_mgpu_pods(),
    equal={
        "requests, limits or both": (
            pod("p", resources({CORE: "50", MEMORY: "6000"})),
            pod("p", resources(None, {CORE: "50", MEMORY: "6000"})),
            pod("p", resources({CORE: "50", MEMORY: "6000"}, {CORE: "50", MEMORY: "6000"})),
            pod("p", resources({CORE: "50"}, {MEMORY: "6000"})),
        ),
        "spellings of a quantity": (
            pod("p", resources({CORE: "50", MEMORY: "6000"})),
            pod("p", resources({CORE: 50, MEMORY: 6000})),
            pod("p", resources({CORE: "50000m", MEMORY: "6k"})),
            pod("p", resources({CORE: "5e1", MEMORY: "6000.0"})),
        ),
        "whole cards, with and without the list": (
            pod("p", resources({CORE: "200"})),
            pod("p", resources({CORE: "0.2k"})),
        ),
        "spaces in the list": (
            pod("p", resources({CORE: "100", MEMORY: "6k"}), annotations={mgpu_dialect.MULTIPLE: "2"}),
            pod("p", resources({CORE: "100", MEMORY: "6k"}), annotations={mgpu_dialect.MULTIPLE: " 2 "}),
        ),
    },
    malformed={
        "no number": (pod("p", resources({CORE: "much", MEMORY: "6k"})), (f"{_PATH}.requests[{CORE}]",)),
        "a fraction, in limits": (
            pod("p", resources(None, {CORE: "500m", MEMORY: "6k"})),
            (f"{_PATH}.limits[{CORE}]",),
        ),
        "two problems in two containers": (
            pod("p", container("a", -1, 512), container("b", 50, 12)),
            (f"{_PATH}.requests[{CORE}]", f"spec.containers[1].resources.requests[{MEMORY}]"),
        ),
        "an init container": (
            pod("p", container("a", 50, 512), init=(container("i", 120),)),
            (f"spec.initContainers[0].resources.requests[{CORE}]",),
        ),
        "an annotation": (
            pod("p", container("a", 50, 512), annotations={mgpu_dialect.MULTIPLE: "one"}),
            (_MULTIPLE_PATH,),
        ),
    },
    settings={
        "index": load_settings(""),
        "id": load_settings("dialects: {mgpu: {MGPUScheduleMode: id}}"),
    },
    unreadable=lambda record: {key: "nonsense" if "index" in key else value for key, value in record.items()},
)


@st.composite
def _gpushare_pods(draw: st.DrawFn) -> Raw:
    """One to three containers that ask, among init containers, sidecars and containers that do not."""

    def one(name: str, *, asks: bool, **more: Any) -> Raw:
        units = str(draw(st.integers(1, 16)))
        kinds = draw(st.sampled_from([("requests",), ("limits",), ("requests", "limits")]))
        amounts = {kind: {gpushare.MEMORY: units} for kind in kinds} if asks else {}
        return {"name": name, "image": "cuda", "resources": amounts, **more}

    asking = st.booleans()
    init = tuple(
        one(f"i{i}", asks=draw(asking), **({"restartPolicy": "Always"} if draw(st.booleans()) else {}))
        for i in range(draw(st.integers(0, 2)))
    )
    apps = [one(f"c{i}", asks=i == 0 or draw(asking)) for i in range(draw(st.integers(1, 3)))]
    return pod("p", *apps, init=init)


_GPU_MEM, _GPU_COUNT = gpushare.MEMORY, gpushare.COUNT

GPUSHARE = Case(
    name="gpushare",
    pods=_gpushare_pods(),
    equal={
        "requests, limits or both": (
            pod("p", resources({_GPU_MEM: "4"})),
            pod("p", resources(None, {_GPU_MEM: "4"})),
            pod("p", resources({_GPU_MEM: "4"}, {_GPU_MEM: "4"})),
        ),
        "spellings of a quantity": (
            pod("p", resources(None, {_GPU_MEM: "2000"})),
            pod("p", resources(None, {_GPU_MEM: 2000})),
            pod("p", resources(None, {_GPU_MEM: "2k"})),
            pod("p", resources(None, {_GPU_MEM: "2000000m"})),
        ),
        "the one card said or not": (
            pod("p", resources(None, {_GPU_MEM: "4"})),
            pod("p", resources(None, {_GPU_MEM: "4", _GPU_COUNT: "1"})),
        ),
    },
    malformed={
        "no number": (pod("p", resources(None, {_GPU_MEM: "much"})), (f"{_PATH}.limits[{_GPU_MEM}]",)),
        "nothing": (pod("p", resources(None, {_GPU_MEM: "0"})), (f"{_PATH}.limits[{_GPU_MEM}]",)),
        "less than nothing": (pod("p", resources({_GPU_MEM: "-1"})), (f"{_PATH}.requests[{_GPU_MEM}]",)),
        "a fraction": (pod("p", resources({_GPU_MEM: "500m"})), (f"{_PATH}.requests[{_GPU_MEM}]",)),
        "beyond any quantity": (pod("p", resources({_GPU_MEM: str(2**63)})), (f"{_PATH}.requests[{_GPU_MEM}]",)),
        "beyond any card": (pod("p", resources({_GPU_MEM: str(2**62)})), (f"{_PATH}.requests[{_GPU_MEM}]",)),
        "gpu-count without gpu-mem": (pod("p", resources(None, {_GPU_COUNT: "1"})), (f"{_PATH}.limits[{_GPU_COUNT}]",)),
        "two cards": (
            pod("p", resources(None, {_GPU_MEM: "4", _GPU_COUNT: "2"})),
            (f"{_PATH}.limits[{_GPU_COUNT}]",),
        ),
        "two problems in two containers": (
            pod("p", resources({_GPU_MEM: "-1"}), {**resources({_GPU_MEM: "x"}), "name": "d"}),
            (f"{_PATH}.requests[{_GPU_MEM}]", f"spec.containers[1].resources.requests[{_GPU_MEM}]"),
        ),
        "an init container": (
            pod("p", resources({_GPU_MEM: "1"}), init=({**resources({_GPU_MEM: "0"}), "name": "i"},)),
            (f"spec.initContainers[0].resources.requests[{_GPU_MEM}]",),
        ),
    },
    settings={
        "GiB": load_settings(""),
        "MiB": load_settings("dialects: {gpushare: {memoryUnit: MiB}}"),
    },
    unreadable=lambda record: {**record, gpushare.INDEX: "nonsense", gpushare.ALLOCATION: "nonsense"},
)


@st.composite
def _koordinator_pods(draw: st.DrawFn) -> Raw:
    """Pods of every combination, with init containers, sidecars, other devices and containers that ask for nothing."""
    percents, counts = st.integers(1, 100), st.integers(1, 4)

    def one(name: str, *, gpu: bool, **more: Any) -> Raw:
        n, core, ratio, memory = draw(counts), draw(percents), draw(percents), draw(st.integers(4 << 20, 2**37))
        kinds: list[dict[str, object]] = [
            {koord.NVIDIA: n},
            {koord.GPU: core},
            {koord.GPU: 100 * n},
            {koord.MEMORY: memory},
            {koord.RATIO: ratio},
            {koord.CORE: core, koord.MEMORY: memory},
            {koord.CORE: 100 * n, koord.MEMORY: memory},
            {koord.CORE: core, koord.RATIO: ratio},
            {koord.SHARED: n, koord.MEMORY: memory},
            {koord.SHARED: n, koord.RATIO: n * ratio},
            {koord.SHARED: n, koord.CORE: n * core, koord.MEMORY: memory},
            {koord.SHARED: n, koord.CORE: n * core, koord.RATIO: n * ratio},
        ]
        amounts = dict(draw(st.sampled_from(kinds if gpu else [{}, *kinds])))
        rdma = {koord.PREFIX + "rdma": draw(percents), koord.PREFIX + "fpga": 100 * n}
        amounts |= draw(st.sampled_from([{}, {}, rdma, {koord.PREFIX + "rdma": 200}]))
        return {**resources(amounts), "name": name, **more}

    init = tuple(
        one(f"i{i}", gpu=False, **({"restartPolicy": "Always"} if draw(st.booleans()) else {}))
        for i in range(draw(st.integers(0, 2)))
    )
    apps = [one(f"c{i}", gpu=i == 0) for i in range(draw(st.integers(1, 3)))]
    return pod("p", *apps, init=init)


def _koordinator_malformed() -> Mapping[str, tuple[Raw, tuple[str, ...]]]:
    bad: dict[str, tuple[Mapping[str, object], str]] = {
        "no number": ({koord.GPU: "much"}, koord.GPU),
        "nothing": ({koord.GPU: "0"}, koord.GPU),
        "less than nothing": ({koord.PREFIX + "rdma": "-100"}, koord.PREFIX + "rdma"),
        "a fraction": ({koord.GPU: "500m"}, koord.GPU),
        "beyond any quantity": ({koord.MEMORY: str(2**63)}, koord.MEMORY),
        "beyond any node": ({koord.GPU: str(100 * 2**50)}, koord.GPU),
        "more memory than any node": ({koord.MEMORY: str(2**63 - 1)}, koord.MEMORY),
        "more cards than any node": ({koord.NVIDIA: "1025"}, koord.NVIDIA),
        "core alone": ({koord.CORE: "50"}, koord.CORE),
        "a number of cards alone": ({koord.SHARED: "2"}, koord.SHARED),
        "two forms at once": ({koord.GPU: "50", koord.RATIO: "50"}, koord.GPU),
        "whole cards and shares": ({koord.NVIDIA: "1", koord.GPU: "50"}, koord.NVIDIA),
        "more than a card, not whole cards": ({koord.GPU: "150"}, koord.GPU),
        "more than a device, not whole devices": ({koord.PREFIX + "npu": "150"}, koord.PREFIX + "npu"),
        "not divisible by the cards": ({koord.SHARED: "2", koord.RATIO: "75"}, koord.RATIO),
        "not divisible by the cards of the other amount": ({koord.CORE: "300", koord.RATIO: "100"}, koord.RATIO),
        "more than the cards have": ({koord.SHARED: "2", koord.RATIO: "202"}, koord.RATIO),
        "less than 1 MiB of each card": ({koord.SHARED: "4", koord.MEMORY: "4095Ki"}, koord.MEMORY),
        "a typo": ({koord.PREFIX + "gpu-mem": "4Gi"}, koord.PREFIX + "gpu-mem"),
    }
    return {
        title: (pod("p", resources(amounts)), (f"{_PATH}.requests[{name}]",)) for title, (amounts, name) in bad.items()
    } | {
        "two problems in a container, one in another": (
            pod(
                "p",
                resources(None, {koord.CORE: "150", koord.RATIO: "250", "cpu": "1"}),
                {**resources({koord.GPU: "x"}), "name": "d"},
            ),
            (
                f"{_PATH}.limits[{koord.CORE}]",
                f"{_PATH}.limits[{koord.RATIO}]",
                f"spec.containers[1].resources.requests[{koord.GPU}]",
            ),
        ),
        "an init container": (
            pod("p", resources({koord.GPU: "1"}), init=({**resources({koord.CORE: "1"}), "name": "i"},)),
            (f"spec.initContainers[0].resources.requests[{koord.CORE}]",),
        ),
    }


KOORDINATOR = Case(
    name="koordinator",
    pods=_koordinator_pods(),
    equal={
        "requests, limits or both": (
            pod("p", resources({koord.GPU: "50"})),
            pod("p", resources(None, {koord.GPU: "50"})),
            pod("p", resources({koord.GPU: "50"}, {koord.GPU: "50"})),
        ),
        "no whole cards, as a LimitRange writes it": (
            pod("p", resources({koord.GPU: "50"})),
            pod("p", resources({koord.GPU: "50", koord.NVIDIA: "0"})),
        ),
        "the shorthand and what it stands for": (
            pod("p", resources({koord.GPU: "50"})),
            pod("p", resources({koord.CORE: "50", koord.RATIO: "50"})),
            pod("p", resources({koord.CORE: "50", koord.RATIO: "50", koord.SHARED: "1"})),
        ),
        "whole cards": (
            pod("p", resources({koord.GPU: "200"})),
            pod("p", resources({koord.CORE: "0.2k", koord.RATIO: "200"})),
            pod("p", resources({koord.SHARED: "2", koord.CORE: "200", koord.RATIO: "200"})),
        ),
        "spellings of a quantity": (
            pod("p", resources({koord.CORE: "60", koord.MEMORY: "4Gi"})),
            pod("p", resources({koord.CORE: 60, koord.MEMORY: "4096Mi"})),
            pod("p", resources({koord.CORE: "6e1", koord.MEMORY: 4 << 30})),
        ),
    },
    malformed=_koordinator_malformed(),
    unreadable=lambda record: dict.fromkeys(record, "nonsense"),
)


MIG_SLICES = ("nvidia.com/mig-1g.10gb", "nvidia.com/mig-1g.10gb.me", "nvidia.com/mig-2g.20gb")
MPS_SLICES = ("nvidia.com/gpu-2gb", "nvidia.com/gpu-4gb")


@st.composite
def _slices_pods(draw: st.DrawFn) -> Raw:
    """Pods under MIG, of several profiles, and under MPS, with init containers, sidecars and idle containers."""
    mig = draw(st.booleans())

    def one(name: str, *, asks: bool, **more: Any) -> Raw:
        names = draw(st.lists(st.sampled_from(MIG_SLICES), min_size=asks, max_size=2, unique=True))
        amounts = {name: draw(st.integers(1, 4)) for name in names}
        if not mig:
            amounts = {draw(st.sampled_from(MPS_SLICES)): 1} if names else {}
        kinds = draw(st.sampled_from([("requests",), ("limits",), ("requests", "limits")]))
        return {"name": name, "image": "cuda", "resources": {kind: dict(amounts) for kind in kinds}, **more}

    init = tuple(
        one(f"i{i}", asks=False, **({"restartPolicy": "Always"} if draw(st.booleans()) else {}))
        for i in range(draw(st.integers(0, 2)))
    )
    apps = [one(f"c{i}", asks=i == 0) for i in range(draw(st.integers(1, 3)))]
    return pod("p", *apps, init=init)


def _slices_malformed() -> Mapping[str, tuple[Raw, tuple[str, ...]]]:
    mig, mps = "nvidia.com/mig-2g.20gb", "nvidia.com/gpu-4gb"
    bad: dict[str, tuple[str, str]] = {
        "no number": (mig, "much"),
        "less than nothing": (mig, "-1"),
        "a fraction": (mig, "500m"),
        "beyond any node": (mig, "1025"),
        "beyond any quantity": (mig, str(2**63)),
        "more than one slice under MPS": (mps, "2"),
        "a slice of nothing": ("nvidia.com/gpu-0gb", "1"),
        "another unit": ("nvidia.com/gpu-4Gi", "1"),
        "no profile": ("nvidia.com/mig-foo", "1"),
        "no profile of MIG": ("nvidia.com/mig-4gb", "1"),
        "media engines as nvidia-smi has them": ("nvidia.com/mig-1g.10gb+me", "1"),
        "another driver's name": ("nvidia.com/mig-7g.79gb", "1"),
    }
    limits = "spec.containers[{}].resources.limits[{}]"
    return {
        title: (pod("p", resources(None, {name: amount})), (limits.format(0, name),))
        for title, (name, amount) in bad.items()
    } | {
        "several sizes under MPS": (
            pod("p", resources(None, {mps: "1", "nvidia.com/gpu-2gb": "1"})),
            (limits.format(0, mps),),
        ),
        "MIG and MPS": (
            pod("p", resources(None, {mig: "1"}), {**resources(None, {mps: "1"}), "name": "d"}),
            (limits.format(1, mps),),
        ),
        "MIG and MPS in a container": (pod("p", resources(None, {mig: "1", mps: "1"})), (limits.format(0, mig),)),
        "two problems in two containers": (
            pod("p", resources(None, {mig: "x"}), {**resources(None, {"nvidia.com/mig-2g": "1"}), "name": "d"}),
            (limits.format(0, mig), limits.format(1, "nvidia.com/mig-2g")),
        ),
        "an init container": (
            pod("p", resources(None, {mig: "1"}), init=({**resources(None, {mig: "-1"}), "name": "i"},)),
            (f"spec.initContainers[0].resources.limits[{mig}]",),
        ),
    }


SLICES = Case(
    name="slices",
    pods=_slices_pods(),
    equal={
        "requests, limits or both": (
            pod("p", resources({MIG_SLICES[2]: "3"})),
            pod("p", resources(None, {MIG_SLICES[2]: "3"})),
            pod("p", resources({MIG_SLICES[2]: "3"}, {MIG_SLICES[2]: "3"})),
        ),
        "spellings of a quantity": (
            pod("p", resources(None, {MPS_SLICES[1]: "1"})),
            pod("p", resources(None, {MPS_SLICES[1]: 1})),
            pod("p", resources(None, {MPS_SLICES[1]: "1000m"})),
        ),
        "two profiles in any order": (
            pod("p", resources(None, {MIG_SLICES[0]: "1", MIG_SLICES[1]: "1"})),
            pod("p", resources(None, {MIG_SLICES[1]: "1", MIG_SLICES[0]: "1"})),
        ),
    },
    malformed=_slices_malformed(),
    unreadable=lambda record: dict.fromkeys(record, '{"c0": {"mig-1g.10gb": ["0:100"]}}'),
    constraints=False,
)

CASES = {case.name: case for case in (MGPU, GPUSHARE, KOORDINATOR, SLICES)}
