"""Becomes the command in its arguments, as a child that does not outlive its parent, however that ends (Linux).

python child.py <pid of the parent> <command> <arguments…>
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, number, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))  # stays set across exec
    if os.getppid() != int(parent):  # it ended before it could be tied to
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
