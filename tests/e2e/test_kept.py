"""What users make of pods after their admission does not stay in the memory of the processes."""

import itertools
import string
from pathlib import Path

from tests.e2e.bench import Bench, share

_PODS = 16
_LABELS = 20_000
"""Of each pod, 320 KB as JSON. Decoded, they take 2.5 MiB."""
_MIB = 1 << 20


def resident(bench: Bench, name: str) -> int:
    """The bytes of memory that a process and its children have."""

    def of(pid: int) -> int:
        own = next(row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if row.startswith("VmRSS"))
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(own.split()[1]) * 1024 + sum(of(int(child)) for child in children)

    return of(bench.cluster.processes[name].pid)


def test_labels_that_are_patched_onto_gated_and_running_pods_fill_no_process(bench: Bench) -> None:
    """The webhook is not asked about updates of labels alone."""
    processes = ("scheduler", "deviceplugin-node-1")
    names = [f"p{i}" for i in range(_PODS)]
    for i, name in enumerate(names):
        spec = {"nodeName": "node-1"} if i % 2 else {"schedulingGates": [{"name": "example.com/wait"}]}
        bench.create(share(name, core=1, mib=256, **spec))
    for name in names[1::2]:
        bench.runs(name)
    before = {process: resident(bench, process) for process in processes}
    keys = ("".join(key) for key in itertools.product(string.ascii_letters, repeat=3))
    patch = {"metadata": {"labels": dict.fromkeys(itertools.islice(keys, _LABELS), "x")}}
    for name in names:
        bench.cluster.api.patch(f"/api/v1/namespaces/default/pods/{name}", patch)
    bench.create(share("last", core=1, mib=256, nodeName="node-1"))
    bench.exact("last")  # by now both processes have seen what came before
    assert len(bench.pod("p0").metadata.labels) == _LABELS
    grown = {process: (resident(bench, process) - before[process]) // _MIB for process in processes}
    assert max(grown.values()) < 15, grown
