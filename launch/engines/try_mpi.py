"""Start and end MPI as Horovod does, so that the launcher finds faults of Open MPI before a run."""

import ctypes
import os
import shutil
import sys

# On a full disk MPI would hang; ranks report it.
folder = os.path.dirname(os.environ['OMPI_MCA_orte_tmpdir_base'])
if os.path.isdir(folder) and shutil.disk_usage(folder).free < 10 << 20:
    sys.exit(75)
# The folder of launch/bind.sh for shared memory.
os.makedirs(f'/dev/shm/mlperf_rn50-{os.environ["MLPERF_RN50_JOB"]}', 0o700, exist_ok=True)
own = os.path.join(sys.prefix, 'lib/libmpi.so.40')
try:
    mpi = ctypes.CDLL(own if os.path.exists(own) else 'libmpi.so.40', ctypes.RTLD_GLOBAL)
except OSError:  # in a container with another MPI
    sys.exit(75)
mpi.MPI_Init_thread(None, None, 3, ctypes.byref(ctypes.c_int()))
mpi.MPI_Barrier(ctypes.byref(ctypes.c_char.in_dll(mpi, 'ompi_mpi_comm_world')))
mpi.MPI_Finalize()
