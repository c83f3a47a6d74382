"""Creates and reads MtgpuPods of a cluster for the end-to-end tests. `Bench` does the same for Pods."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from mgpu.kube import ApiError
from playground.nodes import MGPU, NodeSpec
from scheduler.inspect_command import command as inspect
from tests.e2e.bench import Bench, Json
from tests.waiting import until

A100 = {"model": "NVIDIA A100-SXM4-80GB", "memory": "80Gi", "count": 2}
OURS = NodeSpec("mtgpu-1", [A100], dict(MGPU))
STOCK = NodeSpec("stock-1", [A100], dict(MGPU), nvidia_plugin=True)
"""A node whose whole cards NVIDIA's device plugin serves."""
MTGPUPODS = "/apis/lsalab.nthu/v1/namespaces/default/mtgpupods"
PODS = "/api/v1/namespaces/default/pods"
OCCUPYING = "/api/v1/namespaces/kube-system/pods"


def find_kubectl() -> str:
    """Return the path of kubectl, from PATH or KUBEBUILDER_ASSETS, or "" if neither has it."""
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    return shutil.which("kubectl") or (shutil.which("kubectl", path=folder) if folder else None) or ""


def mtgpupod(name: str, gpuid: str, request: str, node: str = OURS.name, gib: int = 1, **spec: Any) -> Json:
    """Return an MtgpuPod with one container, `c`."""
    share = {"gpu_request": request, "gpu_limit": "1.0", "gpu_mem": str(gib << 30), "GPUID": gpuid}
    annotations = {f"lsalab.nthu/{key}": value for key, value in share.items()}
    return {
        "apiVersion": "lsalab.nthu/v1",
        "kind": "MtgpuPod",
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "cuda"}], **spec},
    }


class Named:
    """MtgpuPods of the namespace `default`."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.api = bench, bench.cluster.api

    def create(self, name: str, gpuid: str, request: str, node: str = OURS.name, **more: Any) -> Json:
        return self.api.create(MTGPUPODS, mtgpupod(name, gpuid, request, node, **more))

    def get(self, name: str) -> Json:
        return self.api.get(f"{MTGPUPODS}/{name}")

    def delete(self, name: str, policy: str = "Background") -> None:
        """Delete the MtgpuPod and wait until it is gone."""
        self.api.delete(f"{MTGPUPODS}/{name}", {"propagationPolicy": policy})
        until(lambda: name not in self.names())

    def names(self) -> set[str]:
        return {raw["metadata"]["name"] for raw in self.api.list(MTGPUPODS)[0]}

    def runs(self, name: str) -> str:
        """Return the UUID of its card as soon as it runs. Every container must see exactly this card."""
        status = until(lambda: (s := self.status(name)).get("phase") == "Running" and s)
        card = str(status["BoundDeviceID"])
        for container in self.api.get(f"{PODS}/{name}")["spec"]["containers"]:
            assert self.bench.environment(name, container["name"])["NVIDIA_VISIBLE_DEVICES"] == card
        return card

    def status(self, name: str) -> Json:
        return dict(self.get(name).get("status") or {})

    def waits(self, name: str, reason: str) -> str:
        """Return the message of its condition Bound as soon as it waits for this reason."""
        row = until(lambda: (c := self.condition(name, "Bound")).get("reason") == reason and c)
        assert (row["status"], self.status(name).get("BoundDeviceID")) == ("False", None)
        return str(row["message"])

    def condition(self, name: str, kind: str) -> Json:
        return next((c for c in self.status(name).get("conditions") or () if c["type"] == kind), {})

    def events(self, name: str, reason: str) -> list[str]:
        selector = f"involvedObject.kind=MtgpuPod,involvedObject.name={name},reason={reason}"
        found = self.api.list("/api/v1/namespaces/default/events", fieldSelector=selector)[0]
        return [str(event["message"]) for event in found]

    def occupying(self) -> dict[str, Json]:
        return {raw["metadata"]["name"]: raw for raw in self.api.list(OCCUPYING)[0]}

    def inspect(self, node: str = OURS.name) -> tuple[list[Json], Json]:
        """Return (the node's cards, its accounting) from `mgpu inspect -o json`."""
        done = CliRunner().invoke(
            inspect, ["-o", "json", "--kubeconfig", str(self.bench.cluster.kubeconfig), node], catch_exceptions=False
        )
        assert done.exit_code == 0, done.output
        found = json.loads(done.output)
        return found["nodes"][node]["cards"], found["accounting"][node]

    def cards(self, node: str = OURS.name) -> list[tuple[str, set[str], float]]:
        """Return (GPUID, pods, percent held) of each card in use, sorted, without the card's index."""
        return sorted(
            (card["gpuid"] or "", {holder.split("/")[1] for holder in card["holders"]}, card["core"]["used"])
            for card in self.inspect(node)[0]
            if card["holders"]
        )

    def left_nothing(self) -> bool:
        """Return whether there is no Pod, no occupy pod, and no card is held."""
        idle = all(state.idle for states in self.bench.samples.states().values() for state in states)
        return not self.occupying() and not self.bench.names() and idle

    def clear(self) -> None:
        for name in self.names():
            self.api.delete(f"{MTGPUPODS}/{name}")
        until(lambda: not self.names())
        self.bench.clear()
        until(self.left_nothing)


def gone(named: Named, path: str) -> bool:
    try:
        named.api.get(path)
    except ApiError as error:
        if error.status != 404:
            raise
        return True
    return False


def limits(named: Named, node: str, uuid: str) -> list[str]:
    """Return the lines of the card's limits file."""
    path: Path = named.bench.cluster.folder / node / "limits" / uuid
    return path.read_text().splitlines() if path.exists() else []
