"""Environment of this process: its rank and size, without communication, and variables that other
programs have left.

Values that end or block a library were tried with MXNet 1.9.1, DALI 2.4.0, Horovod 0.28.1 and
libgomp. Variables for GPUs follow MXNet's documentation. Horovod reads other text as 0.
"""

import os
import platform
import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import MutableMapping
from math import ceil
from pathlib import Path

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.processor import omp_threads

COMMAND = 'MLPERF_RN50_COMMAND'  # the user's command line of a launcher, quoted for a shell
# Set for each process by Open MPI, MPICH, Slurm's PMI, and horovodrun with Gloo.
RANK_VARIABLES = ('OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'PMIX_RANK', 'HOROVOD_RANK')
_SIZE = ('OMPI_COMM_WORLD_SIZE', 'PMI_SIZE', 'PMIX_SIZE', 'HOROVOD_SIZE')
_LOCAL_RANK = ('OMPI_COMM_WORLD_LOCAL_RANK', 'MPI_LOCALRANKID', 'HOROVOD_LOCAL_RANK')
_LOCAL_SIZE = ('OMPI_COMM_WORLD_LOCAL_SIZE', 'MPI_LOCALNRANKS', 'HOROVOD_LOCAL_SIZE')

_MXNET_POSITIVE = """
CPU_PARALLEL_RAND_COPY CPU_PRIORITY_NTHREADS CPU_TEMP_COPY CPU_WORKER_NTHREADS GPU_COPY_NTHREADS
GPU_PARALLEL_RAND_COPY GPU_TEMP_COPY GPU_WORKER_NSTREAMS GPU_WORKER_NTHREADS
KVSTORE_REDUCTION_NTHREADS MP_WORKER_NTHREADS
"""
_MXNET_WHOLE = """
CPU_PARALLEL_SIZE CUDNN_AUTOTUNE_DEFAULT DISABLE_MKLDNN_CONV_OPT DISABLE_MKLDNN_FC_OPT
DISABLE_MKLDNN_FUSE_CONV_BN DISABLE_MKLDNN_FUSE_CONV_RELU DISABLE_MKLDNN_FUSE_CONV_SUM
DISABLE_MKLDNN_TRANSFORMER_OPT ENABLE_CYTHON ENFORCE_CYTHON EXEC_INPLACE_GRAD_SUM_CAP
EXEC_NUM_TEMP GPU_MEM_LARGE_ALLOC_ROUND_SIZE GPU_MEM_POOL_RESERVE
GPU_MEM_POOL_ROUND_LINEAR_CUTOFF KVSTORE_BIGARRAY_BOUND MP_OPENCV_NUM_THREADS OMP_MAX_THREADS
PROFILER_AUTOSTART PROFILER_MODE UPDATE_ON_KVSTORE USE_NUM_CORES_OPERATOR_TUNING
"""
_MXNET_SWITCHES = """
BACKWARD_DO_MIRROR CUDA_ALLOW_TENSOR_CORE CUDA_LIB_CHECKING CUDA_TENSOR_OP_MATH_ALLOW_CONVERSION
CUDNN_LIB_CHECKING DISABLE_MKLDNN_FUSE_FC_ELTWISE DISABLE_MKLDNN_QEM_FLOAT_OUTPUT
DISABLE_MKLDNN_QEM_FUSE_ALL DISABLE_MKLDNN_QFC_FLOAT_OUTPUT DISABLE_MKLDNN_QFC_FUSE_ALL
DISABLE_MKLDNN_QTRANSFORMER_FLOAT_OUTPUT DISABLE_MKLDNN_QTRANSFORMER_FUSE_ALL
ELIMINATE_COMMON_EXPR ENABLE_CUDA_GRAPHS ENABLE_GPU_P2P ENGINE_INFO EXEC_BULK_EXEC_INFERENCE
EXEC_BULK_EXEC_TRAIN EXEC_ENABLE_INPLACE INFER_STORAGE_TYPE_VERBOSE_LOGGING KVSTORE_LOGTREE
KVSTORE_USETREE MEM_PLAN_VERBOSE_LOGGING MKLDNN_DEBUG MKLDNN_ENABLED MKLDNN_FORCE_FC_AB_FORMAT
OUTPUT_TUNING_DATA SAFE_ACCUMULATION USE_FUSION VERBOSE_TUNING_INFO
"""
_HOROVOD_WHOLE = """
CACHE_CAPACITY FUSION_THRESHOLD GLOO_TIMEOUT_SECONDS NUM_NCCL_STREAMS STALL_CHECK_TIME_SECONDS
STALL_SHUTDOWN_TIME_SECONDS
"""
# of threads or buffers; MXNet aborts without room for them
_COUNT = r'0*[1-9]\d{0,2}', 'a whole number of 1 to 999'
_WHOLE = r'\d{1,9}|1\d{9}|20\d{8}|2147483647', 'a whole number of at most 2147483647'
# (prefix, names, pattern of the value, description of the value)
_FORMS = (
    ('MXNET_', _MXNET_POSITIVE, *_COUNT),
    ('MXNET_', 'OPTIMIZER_AGGREGATION_SIZE', r'0*[1-9]\d{0,8}', 'a whole number of at least 1'),
    ('MXNET_', _MXNET_WHOLE, *_WHOLE),
    # MXNet reserves memory for them
    (
        'MXNET_EXEC_BULK_EXEC_MAX_NODE_',
        'TRAIN TRAIN_BWD TRAIN_FWD',
        r'\d{1,7}',
        'a whole number of at most 9999999',
    ),
    ('MXNET_', _MXNET_SWITCHES, '0|1|(?i:true|false)', '0 or 1'),
    ('MXNET_', 'MKLDNN_CACHE_NUM', r'-1|\d{1,9}', 'a whole number, or -1 for no limit'),
    ('MXNET_', 'TUNING_WEIGHT_SCALE', r'\d+\.?\d*|\.\d+', 'a number'),
    (
        'MXNET_',
        'ENGINE_TYPE',
        'NaiveEngine|ThreadedEngine(PerDevice)?',
        'NaiveEngine, ThreadedEngine or ThreadedEnginePerDevice',
    ),
    ('HOROVOD_', _HOROVOD_WHOLE, r'\d{1,18}', 'a whole number'),
    # An exchange waits for this time.
    ('HOROVOD_', 'CYCLE_TIME', r'\d{1,3}(\.\d*)?|\.\d+', 'a number of milliseconds below 1000'),
    ('HOROVOD_', 'THREAD_AFFINITY', r'\d+(\s*,\s*\d+)*', 'CPU numbers with commas'),
    ('DALI_', 'AFFINITY_MASK', r'\d+(\s*,\s*\d+)*', 'CPU numbers with commas'),
    ('DALI_', 'EXEC2_NUM_THREADS', *_COUNT),  # DALI would wait for ever
    ('DMLC_', 'ROLE', 'worker', 'worker'),  # MXNet would become a parameter server
    ('NNVM_', 'EXEC_MATCH_RANGE EXEC_NUM_TEMP', *_WHOLE),
    ('NNVM_', 'AUTO_SEARCH_MATCH_RANGE', '0|1|(?i:true|false)', '0 or 1'),
    ('DALI_', 'MALLOC_POOL_THRESHOLD', r'\d+[kM]?', 'a number of bytes, such as 4096 or 64k'),
    # libgomp would wait for ever
    ('GOMP_', 'CPU_AFFINITY', r'[\d\s,:-]*\d[\d\s,:-]*', 'CPU numbers, such as 0-3'),
)
# Variables that tell a process its rank. Those of a launcher come from an outer job or an old
# shell.
_OF_RANKS = re.compile(
    r'HOROVOD_(RANK|SIZE|LOCAL_|CROSS_|GLOO_RENDEZVOUS_|HOSTNAME|ELASTIC)|OMPI_(COMM|UNIVERSE)_|'
    r'OMPI_MCA_(ess|orte_(app_num|bound|ess_|hnp_uri|jobfam|local_daemon|num_nodes|top_session))|'
    r'PMIX?_(?!MCA_)|MPI_LOCAL'
)
_OF_GLOO = ('HOROVOD_CONTROLLER', 'HOROVOD_CPU_OPERATIONS')


def environment_number(name: str) -> int | None:
    """Return the whole number in an environment variable, None if it is not set; raise ConfigError
    for other text."""
    text = os.environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r'\s*\d{1,9}\s*', text, re.ASCII):
        raise ConfigError(f'{name}: got {text[:40]!r} in the environment, expected a whole number')
    return int(text)


def _number(names: tuple[str, ...]) -> int | None:
    return next((environment_number(n) for n in names if n in os.environ), None)


def _slurm_number(name: str) -> int | None:
    """Return a number of the Slurm step under srun --mpi=pmix, where PMIx sets only the rank;
    otherwise None."""
    return environment_number(name) if 'PMIX_RANK' in os.environ else None


def launched_size() -> int | None:
    """Return the number of ranks; None if no launcher started them."""
    size = _number(_SIZE)
    return _slurm_number('SLURM_STEP_NUM_TASKS') if size is None else size


def launched_rank() -> int:
    """Return this process's rank; 0 if no launcher started it."""
    return _number(RANK_VARIABLES) or 0


def launched_local() -> tuple[int, int]:
    """Return this process's rank on its node and the number of ranks there; (0, 1) without a
    launcher."""
    rank, size = _number(_LOCAL_RANK), _number(_LOCAL_SIZE)
    if rank is None and size is None and (num_tasks := _slurm_number('SLURM_STEP_NUM_TASKS')):
        rank = _slurm_number('SLURM_LOCALID')
        tasks = os.environ.get('SLURM_STEP_TASKS_PER_NODE', '')
        size = _tasks_on_node(tasks, _slurm_number('SLURM_NODEID') or 0)
        if not size:  # the same number on each node
            size = ceil(num_tasks / (_slurm_number('SLURM_STEP_NUM_NODES') or 1))
    rank = rank or 0
    size = size or 1
    if rank >= size:
        raise ConfigError(
            f'rank on this node: got {rank} with {size} ranks, expected at most {size - 1}, from '
            'the environment of the launcher; start the ranks with a script in launch/'
        )
    return rank, size


def _tasks_on_node(text: str, node: int) -> int:
    """Return the tasks of a node from Slurm's list, such as 4(x2),3 for 4, 4 and 3; 0 if it is not
    in the list."""
    for tasks, repeats in re.findall(r'(\d{1,9})(?:\(x(\d{1,9})\))?', text, re.ASCII):
        node -= int(repeats or 1)
        if node < 0:
            return int(tasks)
    return 0


def resume_command(checkpoints: Path, is_newest: bool = True) -> str:
    """Return the command line that resumes a run; is_newest: whether it is the one that the
    launcher would resume."""
    typed = os.environ.get(COMMAND)
    if not typed:
        typed = shlex.join(['mlperf-rn50', 'train', *sys.argv[2:]])
        if num_ranks := os.environ.get('OMPI_COMM_WORLD_SIZE'):  # of mpirun without a launcher
            typed = f'mpirun -np {num_ranks} {typed}'
    words = shlex.split(typed)
    # The first option of train follows its name; without it, the command is that of a launcher.
    first = 0
    for i in range(len(words) - 1, 0, -1):
        if os.path.basename(words[i - 1]) == 'mlperf-rn50' and words[i] == 'train':
            first = i + 1
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument('--resume', nargs='?', const='')
    if is_newest and not first:
        given, others = parser.parse_known_args(words)
        path = [str(checkpoints)] if given.resume else []
        return shlex.join([*others, '--resume', *path])
    start = words[:first]
    if not start:
        num_local = launched_local()[1]
        hosts = ['--hosts', 'HOSTS'] if num_local < (launched_size() or 1) else []
        start = ['launch/ranks.sh', *hosts, str(num_local), 'mlperf-rn50', 'train']
    # the run folder lacks a resume's options
    given, changes = parser.parse_known_args(words[first or len(words) :])
    return shlex.join([*start, '--resume', str(checkpoints), *(changes if given.resume else [])])


def rank_name() -> str:
    """Return the name of this process for a message, such as 'rank 2 on h3'."""
    return f'rank {launched_rank()} on {platform.node()}'


def print_stderr(line: str) -> None:
    """Write a line to stderr in a single write, so that lines of ranks do not mix; unbuffered
    print() writes twice."""
    if sys.stderr:  # None if stderr was closed at the start
        sys.stderr.write(f'{line}\n')
        sys.stderr.flush()


def settle_variables(env: MutableMapping[str, str], starts_ranks: bool = False) -> None:
    """Correct an environment before it is used; raise ConfigError for a value that a library would
    not survive.

    OMP_NUM_THREADS becomes one number, because MXNet reads no list; without a number, it and empty
    variables are removed. Horovod's controller is the one of the program that started this rank.

    Args:
        starts_ranks: True for a launcher, whose ranks get their own variables.
    """
    for prefix, names, pattern, expected in _FORMS:
        for name in (prefix + word for word in names.split()):
            text = env.get(name, '').strip()
            _set(env, name, text)
            if text and not re.fullmatch(pattern, text, re.ASCII):
                raise ConfigError(
                    f'{name}: got {text[:40]!r} in the environment, expected {expected}; correct '
                    'or unset it'
                )
    _set(env, 'OMP_NUM_THREADS', str(omp_threads(env.get('OMP_NUM_THREADS', '')) or ''))
    for name in [n for n in env if starts_ranks and _OF_RANKS.match(n)]:
        del env[name]
    has_mpi = 'OMPI_COMM_WORLD_RANK' in env or 'PMIX_RANK' in env
    is_gloo = 'HOROVOD_GLOO_RENDEZVOUS_ADDR' in env and not has_mpi
    for name in _OF_GLOO:
        if not is_gloo and env.get(name, '').lower() != 'ccl':
            env.pop(name, None)


def _set(env: MutableMapping[str, str], name: str, text: str) -> None:
    """Set a variable, or remove it if the text is empty; a correct one stays untouched."""
    if not text:
        env.pop(name, None)
    elif env.get(name) != text:
        env[name] = text
