"""Repeats the experiment of docs/design/fragmentation.md at full scale: `python -m bench.openb FOLDER`.

FOLDER contains the CSV files of the openb trace (alibaba/clusterdata, cluster-trace-gpu-v2023). They are not part of
this repository, so `make bench` does not run this module. It takes about two minutes on two cores.
"""

import sys
from pathlib import Path

from playground.simulate.openb.experiment import run_all
from playground.simulate.openb.openb_command import mean_curves
from playground.simulate.openb.trace import read_trace

NODES = "openb_node_list_gpu_node.csv"
PUBLISHED = {"random": 87.47, "bestfit": 93.08, "fgd": 95.39}
"""The percentage of the GPUs that is allocated when the pods that have arrived request 130 % of the GPUs. The figures
of the paper (docs/design/fragmentation.md) show these values for the default trace."""
POLICIES = (*PUBLISHED, "fragmentation")
SEEDS = (42, 43, 44)


def main(folder: Path) -> None:
    pods = folder / "openb_pod_list_default.csv"
    trace = read_trace(folder / NODES, pods)
    found = len(trace.nodes), trace.capacity, len(trace.pods)
    if found != (1213, 6_212_000, 8152):
        raise SystemExit(f"{folder} has another trace: its nodes, thousandths of GPUs, and pods are {found}")
    runs = run_all(trace, [(policy, seed) for policy in POLICIES for seed in SEEDS], 1.3, lambda: None)
    print(f"Percent of the GPUs allocated after requests for 130 % of them, means of seeds {SEEDS[0]} to {SEEDS[-1]}")
    for policy, curve in mean_curves(runs).items():
        print(f"  {policy:13}  {curve[130]:6.2f}   published {PUBLISHED.get(policy, '-')}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
