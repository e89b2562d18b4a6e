"""Execute a program with SIGTERM blocked, because scancel also sends it to mpirun and orted, which would kill ranks.

Open MPI unblocks all signals in the ranks, so they receive it.
"""
import os
import signal
import sys

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.execv(sys.argv[1], sys.argv[1:])
