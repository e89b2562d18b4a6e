"""Agreement checks across ranks, and detection of stragglers."""

import ctypes
import json
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any

from mxnet import nd
from mxnet.ndarray import NDArray

from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.recordio import data_digest
from mlperf_rn50.errors import DataError, RunFailed
from mlperf_rn50.system.cgroup import read_small
from mlperf_rn50.system.power import BOOT_ID
from mlperf_rn50.train.comm.horovod import Comm, wait_for

_NUM_JOINED = 4  # arrays per digest, which limits temporary memory; 95 MB with ResNet-50
STRAGGLER_FACTOR = 1.15  # a straggler's compute time is above this multiple of the median


class WallClock:
    """The wall clock of this host, compared with its monotonic clock."""

    def __init__(self) -> None:
        self._ahead_s = time.time() - time.monotonic()

    def take_step_s(self) -> float:
        """Return the seconds by which the wall clock was changed since the last call."""
        before, self._ahead_s = self._ahead_s, time.time() - time.monotonic()
        return self._ahead_s - before


def boot_clock() -> tuple[str, float]:
    """Return the id of this boot of the host, '' if unknown, and the seconds since then, time of
    suspension included.

    All processes of a boot read the same clock, which cannot be set.
    """
    return read_small(BOOT_ID), time.clock_gettime(time.CLOCK_BOOTTIME)


def digest_of_all_hosts(data: DataConfig, comm: Comm) -> str:
    """Return the digest of the data; raise DataError if they differ between hosts."""
    # each rank reads its own manifest, also for keys that default to it
    own = data_digest(data)
    digest = comm.from_rank_0(lambda: own)
    if own != digest:
        raise DataError(
            f'{data.dir}: got data with SHA-256 {own:.12}…, expected {digest:.12}… as on '
            'rank 0; copy the same data to all hosts'
        )
    return digest


def device_digests(arrays: Mapping[str, NDArray]) -> dict[str, int]:
    """Return digests of the bits of groups of float32 and float16 arrays, by name, computed on
    their device.

    The bits of each value, as an integer, are multiplied by an odd number that depends on the
    position, and summed modulo 2**64, in any order. A change of one value or a swap of two always
    changes a digest; others almost always.
    """
    names, digests = list(arrays), {}
    for group in (names[i : i + _NUM_JOINED] for i in range(0, len(names), _NUM_JOINED)):
        joined = nd.concat(
            *(arrays[n].reshape((-1,)).astype('float32', copy=False) for n in group), dim=0
        )
        factors = nd.arange(1, 2 * joined.size, 2, ctx=joined.context, dtype='int64')
        # Read before `joined` is freed, because MXNet does not know that the bits are in its
        # memory.
        digests[f'{group[0]} to {group[-1]}'] = int(
            (_bits_of(joined).astype('int64') * factors).sum().asscalar()
        )
    return digests


def _bits_of(array: NDArray) -> NDArray:
    """Return the bits of a float32 array as int32, in its memory; MXNet 1.9.1 has no operator for
    this."""
    wait_for(array)
    capsule = array.to_dlpack_for_read()
    ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
    address = ctypes.pythonapi.PyCapsule_GetPointer(ctypes.py_object(capsule), b'dltensor')
    # kDLInt instead of kDLFloat in DLTensor.dtype.code of dlpack.h
    ctypes.c_uint8.from_address(address + 20).value = 0
    return nd.from_dlpack(capsule)


def check_agreement(comm: Comm, digests: Mapping[str, int], epoch: int) -> None:
    """Raise RunFailed if the ranks' arrays differ after an epoch (epochs count from 0). All ranks
    must call this."""
    own = zlib.crc32(json.dumps(sorted(digests.items())).encode())
    total = comm.sum([own])[0]
    # if the ranks differ, at least one is not equal to the mean
    if comm.sum([own * comm.world_size != total])[0]:
        raise RunFailed(describe_divergence(comm.gather_object(dict(digests)), epoch))


def check_finite(name: str | None, epoch: int) -> None:
    """Raise RunFailed if `name`, that of a non-finite array, is not None. All ranks call this after
    check_agreement."""
    if name:
        raise RunFailed(
            f'{name} holds values that are not finite after epoch {epoch + 1}, which a ReLU may '
            'hide from the loss; resume from a checkpoint before this epoch'
        )


def describe_divergence(digests: Sequence[Mapping[str, int]], epoch: int) -> str:
    """Describe which ranks differ from the majority, and the first differing array; digests: by
    rank and array."""
    counts = {name: Counter(d[name] for d in digests) for name in digests[0]}
    names = [n for n in counts if len(counts[n]) > 1]
    usual = {n: counts[n].most_common(1)[0] for n in names}
    # Without a majority, the deviating rank is unknown, so all ranks are listed.
    has_most = all(2 * count > len(digests) for _, count in usual.values())
    ranks = [
        r for r, d in enumerate(digests) if not has_most or any(d[n] != usual[n][0] for n in names)
    ]
    return (
        f'the ranks no longer agree after epoch {epoch + 1}: rank {", ".join(map(str, ranks))} of '
        f'{len(digests)}, first in {names[0]} ({len(names)} of {len(counts)} arrays differ); '
        'memory or network of a rank corrupted data silently; test the node, then resume from a '
        'checkpoint before this epoch'
    )


def find_stragglers(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe the stragglers among ranks with the keys of RankSteps, slowest first."""
    if len(ranks) < 2:
        return []
    usual_s = median_low(r['compute_s'] for r in ranks)
    slow = sorted(
        (r for r in ranks if usual_s and r['compute_s'] > STRAGGLER_FACTOR * usual_s),
        key=lambda r: -r['compute_s'],
    )
    return [_describe_straggler(r, usual_s) for r in slow]


def _describe_straggler(rank: Mapping[str, Any], usual_s: float) -> str:
    own_ms, usual_ms = (1000 * s / rank['num_steps'] for s in (rank['compute_s'], usual_s))
    lost = (rank['compute_s'] - usual_s) / sum(
        rank.get(f'{name}_s', 0.0) for name in ('python', 'data', 'compute', 'wait', 'update')
    )
    return (
        f'rank {rank["rank"]} on {rank["host"]} (cores {rank["cores"]}) is slow: it computes for '
        f'{own_ms:.0f} ms per step (median {usual_ms:.0f} ms); all ranks wait for it and lose '
        f'{lost:.0%} of each step'
    )
