"""Becomes the command in its arguments, as a child that does not outlive its parent, however that ends (Linux).

python child.py <pid of the parent> <command> <arguments…>
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        # Stays set across exec. SIGTERM, so that the command can end its own children in order.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it ended before it could be tied to
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
