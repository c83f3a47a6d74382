"""A small trace: ten GPUs, and pods of every kind."""

from pathlib import Path

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
