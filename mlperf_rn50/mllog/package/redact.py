"""What is published of the environment and configuration of runs: no name of a host or person, no
path, no address, and only variables that are known to be harmless."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlperf_rn50.config import KEYS
from mlperf_rn50.config_file import load_tree
from mlperf_rn50.files import open_regular
from mlperf_rn50.mllog.check.faults import Fault
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.read.description import (
    JsonObject,
    load_env,
    object_at,
    objects_at,
    value_at,
)
from mlperf_rn50.runfolder.names import run_of

_KEPT = 'python git_commit num_nodes ranks_per_node'.split()
_HOST = 'hostname os os_name cpu processor cpu_cores memory_bytes gpus hardware'.split()
_VARIABLES = frozenset(
    """
    CUDA_DEVICE_ORDER CUDA_VISIBLE_DEVICES DALI_AFFINITY_MASK DNNL_MAX_CPU_ISA GLIBC_TUNABLES
    HOROVOD_BATCH_D2D_MEMCOPIES HOROVOD_CACHE_CAPACITY HOROVOD_CPU_OPERATIONS HOROVOD_CYCLE_TIME
    HOROVOD_ENABLE_ASYNC_COMPLETION HOROVOD_FUSION_THRESHOLD HOROVOD_GPU_OPERATIONS
    HOROVOD_HIERARCHICAL_ALLREDUCE HOROVOD_NUM_NCCL_STREAMS
    KMP_AFFINITY KMP_BLOCKTIME KMP_DUPLICATE_LIB_OK KMP_INIT_AT_FORK
    MLPERF_RN50_IMAGE
    MXNET_ASYNC_GPU_ENGINE MXNET_CPU_WORKER_NTHREADS MXNET_CUDNN_AUTOTUNE_DEFAULT
    MXNET_CUDNN_LIB_CHECKING MXNET_CUDNN_NHWC_BN_ADD_HEURISTIC_BWD
    MXNET_CUDNN_NHWC_BN_ADD_HEURISTIC_FWD MXNET_CUDNN_NHWC_BN_HEURISTIC_BWD
    MXNET_CUDNN_NHWC_BN_HEURISTIC_FWD MXNET_CUDNN_WARN_ON_IGNORED_FLAGS MXNET_ENABLE_CUDA_GRAPHS
    MXNET_ENFORCE_DETERMINISM MXNET_ENGINE_TYPE MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD
    MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_FWD MXNET_GPU_WORKER_NTHREADS MXNET_USE_FUSION
    NCCL_ALGO NCCL_BUFFSIZE NCCL_COLLNET_ENABLE NCCL_CROSS_NIC NCCL_DEBUG NCCL_DEBUG_SUBSYS
    NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_IB_QPS_PER_CONNECTION NCCL_IB_SL
    NCCL_IB_TC NCCL_IB_TIMEOUT NCCL_MAX_NCHANNELS NCCL_MIN_NCHANNELS NCCL_NET_GDR_LEVEL
    NCCL_NET_GDR_READ NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS NCCL_P2P_DISABLE NCCL_P2P_LEVEL
    NCCL_PROTO NCCL_SHM_DISABLE NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS NCCL_VERSION
    OMP_DYNAMIC OMP_NUM_THREADS OMP_PLACES OMP_PROC_BIND OMP_SCHEDULE OMP_WAIT_POLICY
    """.split()
)
_SITE = re.compile(
    r"""^/. | (^|[\s=:,;'"(\[])(~|/[\w.@-]+)/[\w.@-]  # a path
    | \b\d{1,3}(\.\d{1,3}){3}\b | \b[0-9a-f]{1,4}(:[0-9a-f]{0,4}){3,7}\b  # IPv4, IPv6
    | [\w.+-]+@[\w-]+\.\w""",
    re.VERBOSE | re.IGNORECASE,
)
_ADDRESS = r'\d{1,3}(\.\d{1,3}){3}'
_SHORTEST = 3  # characters of a name that is searched in logs
# Names of hosts that every log may contain as words.
_COMMON = {'localhost', 'resnet', 'imagenet', 'node', 'lars', 'open', 'closed', 'train'}


@dataclass(frozen=True)
class Site:
    """What identifies the site of some runs."""

    hosts: dict[str, str]  # node1, node2 and so on by host name
    paths: frozenset[str] = frozenset()  # of the runs and their data, and home folders

    def publish(self, value: Any) -> Any:
        """Return a JSON value with node1 and so on in place of host names and their domains, and
        without keys that contain a path or an address."""
        if isinstance(value, dict):
            shown = {key: self.publish(item) for key, item in value.items()}
            return {key: item for key, item in shown.items() if not _is_private(item)}
        if isinstance(value, list):
            return [self.publish(item) for item in value]
        if not (isinstance(value, str) and self.hosts):
            return value
        return _words(self.hosts).sub(lambda found: self.hosts[found[1]], value)


def _is_private(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return any(isinstance(text, str) and _SITE.search(text) for text in texts)


def _words(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(map(re.escape, names), key=len, reverse=True)
    return re.compile(rf'(?<![\w.-])({"|".join(longest_first)})(?:\.[a-zA-Z][\w-]*)*(?![\w-])')


def find_site(runs: Sequence[Run]) -> Site:
    """Return the hosts of runs, numbered as they appear, and their paths."""
    hosts: dict[str, str] = {}
    paths: set[str] = set()
    for run in runs:
        env, config = load_env(run.path), load_tree(run_of(run.path).config)
        for node in [*objects_at(env, 'nodes'), object_at(env, 'host')]:
            if name := str(node.get('hostname') or ''):
                # a name and the same one with its domain are one host
                label = name if re.fullmatch(_ADDRESS, name) else name.partition('.')[0]
                number = hosts.get(label) or f'node{len(set(hosts.values())) + 1}'
                hosts |= {label: number, name: number}
        for names in (('run', 'dir'), ('data', 'dir'), ('train', 'init_weights')):
            path = str(value_at(config, *names))
            home = re.match('/(home|Users)/[^/]+', path)
            paths |= {text for text in (path, home and home[0]) if text and text.startswith('/')}
    return Site(hosts, frozenset(paths))


def public_env(env: JsonObject, site: Site) -> JsonObject:
    """Return what is published of env.json."""
    host = {key: value for key, value in object_at(env, 'host').items() if key in _HOST}
    variables = object_at(env, 'variables')
    return {
        **{key: env[key] for key in _KEPT if key in env},
        'packages': object_at(env, 'packages'),
        'libraries': object_at(env, 'libraries'),
        'host': site.publish(host),
        'nodes': site.publish(objects_at(env, 'nodes')),
        'variables': site.publish({k: v for k, v in variables.items() if k in _VARIABLES}),
    }


def _is_fixed(key: str) -> bool:
    """Return whether the values of a configuration key are words of this program."""
    return key == 'data.dataset' or key in KEYS and 'Literal' in str(KEYS[key].type)


def public_config(tree: JsonObject, site: Site) -> JsonObject:
    """Return what is published of a configuration. The scripts of a tree set the folders."""
    shown = {}
    for section, values in tree.items():
        shown[section] = site.publish(values)
        if isinstance(values, dict):  # the name of a host may be gpu
            fixed = {k: v for k, v in values.items() if _is_fixed(f'{section}.{k}')}
            shown[section] |= fixed
    if isinstance(run := shown.get('run'), dict):
        run.pop('submission_poc_name', None)
    return shown


def check_logs(runs: Sequence[Run], site: Site) -> list[Fault]:
    """Return the names and paths of the site that occur in the logs, which are published as they
    are."""
    names = [n for n in (*site.hosts, *site.paths) if len(n) >= _SHORTEST and n not in _COMMON]
    if not names:
        return []
    pattern = _words(names)
    faults = []
    for run in runs:
        with open_regular(run.path) as file:
            text = file.read().decode('utf-8', 'replace')
        if found := sorted(set(pattern.findall(text))):
            text = (
                f'contains {", ".join(found)}, which would be published, and logs are never '
                'changed; use neutral names for the next runs'
            )
            faults.append(Fault(run.path.name, '', text, 'privacy'))
    return faults
