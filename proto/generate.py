"""Generates the gRPC modules from proto/*.proto.

    python proto/generate.py            write the modules
    python proto/generate.py --check    fail if the modules in proto/ differ from the generated ones

The modules depend on the version of grpcio-tools, so pyproject.toml pins this version.
"""

import sys
import tempfile
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "proto/cri.proto",
    "proto/deviceplugin.proto",
    "proto/dra.proto",
    "proto/dra_health.proto",
    "proto/pluginregistration.proto",
    "proto/podresources.proto",
)
KINDS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(into: Path) -> None:
    """Write the modules to the directory `proto` in `into`.

    protoc gets the paths relative to ROOT, so that the modules import one another as `proto.…`.
    """
    options = [f"--{kind}={into}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    known = files("grpc_tools") / "_proto"
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{known}", *options, *SOURCES]) != 0:
        sys.exit("error: protoc failed")


def stale() -> list[str]:
    """Return the paths of the generated files that are missing or differ from a newly generated file."""
    names = [source.removesuffix(".proto") + kind for source in SOURCES for kind in KINDS]
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        return [n for n in names if not (ROOT / n).exists() or (ROOT / n).read_text() != (Path(folder) / n).read_text()]


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if differing := stale():
            tools = f"grpcio-tools {version('grpcio-tools')} is installed"
            sys.exit(f"error: generated files are out of date, run `make proto`: {', '.join(differing)} ({tools})")
    elif sys.argv[1:]:
        sys.exit("usage: python proto/generate.py [--check]")
    else:
        generate(ROOT)
