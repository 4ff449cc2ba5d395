"""Runs a module in this process's place, so that it can't outlive the process that started it.

    python -I -S cli/child.py PARENT_PID MODULE ARGUMENTS...

On Linux the kernel sends SIGTERM when the parent dies, by kill -9 too; the setting outlives exec.
Elsewhere the module starts without that net.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    parent, module, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != int(parent):  # it died before the setting was made
            sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    main()
