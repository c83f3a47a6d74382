"""A script that replaces itself with a command. On Linux, the kernel signals the command when its parent process ends.

    python child.py <pid of the parent> <signal number> <command> <arguments…>

`processes.spawn` runs the script with `python -S -E`, so it may import only the standard library.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, number, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))  # execv keeps this setting
    if os.getppid() != int(parent):  # the parent ended before prctl took effect
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
