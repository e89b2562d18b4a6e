"""Execute mpirun or orted of a Slurm job with SIGTERM blocked. scancel sends SIGTERM also to these
programs, which would then kill the ranks. Open MPI unblocks all signals in the ranks."""

import os
import signal
import sys

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.execv(sys.argv[1], sys.argv[1:])
