"""Execute a program with SIGTERM blocked: scancel sends it to mpirun and orted too, which would kill their ranks.

Open MPI unblocks all signals in the ranks, which therefore receive it.
"""
import os
import signal
import sys

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.execv(sys.argv[1], sys.argv[1:])
