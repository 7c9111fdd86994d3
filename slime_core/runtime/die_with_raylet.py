"""Runs one of Ray's agents, which the kernel kills when its raylet ends; see :mod:`slime_core.runtime.session`.

    python -I -S die_with_raylet.py COMMAND ...

Ray's agents look for their raylet by themselves, and on a busy machine notice its end more than a minute later. Only
the standard library is imported, so it starts in 20 ms.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the exec below keeps it (prctl(2))
    if os.getppid() != int(os.environ.get("RAY_RAYLET_PID", os.getppid())):  # it ended before the line above
        sys.exit(1)
    os.execv(sys.argv[1], sys.argv[1:])
