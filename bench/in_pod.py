"""Runs a command of mgpu as in a pod: `python -m bench.in_pod FOLDER COMMAND…`.

FOLDER has the service account, which the kubelet mounts at a fixed path. The environment names the API server.
"""

import sys
from functools import partial
from pathlib import Path

from mgpu.cli.main import main
from mgpu.kube import client
from mgpu.kube.service_account import ServiceAccount

if __name__ == "__main__":
    vars(client)["ServiceAccount"] = partial(ServiceAccount, folder=Path(sys.argv[1]))
    main(sys.argv[2:])
