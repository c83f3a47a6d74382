"""Traces of our own in the form of openb's files: a small one with pods of every kind, and random ones of any size."""

from pathlib import Path
from random import Random

NODES = """\
sn,cpu_milli,memory_mib,gpu,model
n1,16000,65536,2,T4
n2,32000,131072,4,G2
n3,32000,131072,4,G2
n4,8000,32768,0,
"""
PODS = """\
name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos
p1,1000,1024,1,300,,LS
p2,1000,1024,1,700,,LS
p3,2000,2048,1,1000,,LS
p4,2000,2048,1,500,T4,LS
p5,4000,4096,2,1000,V100M16 | G2,BE
p6,3000,1024,0,0,,BE
"""


def written(folder: Path, nodes: str = NODES, pods: str = PODS) -> tuple[Path, Path]:
    """(list of nodes, list of pods)"""
    files = folder / "nodes.csv", folder / "pods.csv"
    for file, text in zip(files, (nodes, pods), strict=True):
        file.write_text(text)
    return files


def generated(folder: Path, random: Random, *, nodes: int, pods: int) -> tuple[Path, Path]:
    """Write a random trace with all columns that openb's files have; one pod in five asks for no GPU.

    Returns:
        (list of nodes, list of pods)
    """
    node_rows = ["sn,cpu_milli,memory_mib,gpu,model"]
    for i in range(nodes):
        cards, model = random.choice(((2, "P100"), (2, "T4"), (8, "V100M16"), (8, "G2")))
        node_rows.append(f"node-{i:04},{cards * 12_000},{cards * 96_000},{cards},{model}")
    pod_rows = [
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
    ]
    for i in range(pods):
        cards, milli = random.choice(((0, 0), (1, random.randrange(50, 1000, 10)), (1, 1000), (2, 1000), (4, 1000)))
        model = random.choice(("", "", "G2", "T4|P100")) if cards == 1 else ""
        size = f"{1000 * random.randint(1, 8)},{1024 * random.randint(1, 32)}"
        times = f"{i},{i + 1000},{i}"
        pod_rows.append(f"pod-{i:04},{size},{cards},{milli},{model},{random.choice(('LS', 'BE'))},Running,{times}")
    return written(folder, "\n".join(node_rows), "\n".join(pod_rows))
