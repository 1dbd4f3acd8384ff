"""`python -m deadpool.mpi.tether PID COMMAND...`: become COMMAND, and end when process PID does.

For what a guardian starts but does not fork itself: PR_SET_PDEATHSIG outlives an exec.
"""

from __future__ import annotations

import os
import sys

from deadpool.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
