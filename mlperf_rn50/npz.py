"""Reader of untrusted .npy and .npz files. It accepts only numbers and never reads more than the
file size."""

import io
import math
import os
import zipfile
from typing import IO, BinaryIO

import numpy as np

Arrays = dict[str, np.ndarray]


def read_arrays(data: bytes) -> Arrays:
    """Return the arrays of an uncompressed .npz by name. Raise ValueError for other content and
    non-finite values."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            if any(m.compress_type != zipfile.ZIP_STORED or m.flag_bits & 1 for m in members):
                raise ValueError(
                    'got compressed or encrypted arrays, expected uncompressed and unencrypted ones'
                )
            if sum(m.file_size for m in members) > len(data):
                raise ValueError(f'got arrays larger than the {len(data)} bytes of the file')
            arrays = {m.filename.removesuffix('.npy'): _read_array(archive, m) for m in members}
    except (ValueError, MemoryError):  # a lack of memory is no damage
        raise
    except Exception as e:  # zipfile and NumPy raise many types for damaged headers
        raise ValueError(
            f'not an .npz ({" ".join(str(e).split())[:200] or type(e).__name__})'
        ) from e
    if name := find_non_finite(arrays):
        num_bad = int((~np.isfinite(arrays[name])).sum())
        raise ValueError(
            f'{name}: got {num_bad} non-finite of {arrays[name].size} values, expected none'
        )
    return arrays


def find_non_finite(arrays: Arrays) -> str | None:
    """Return the name of the first array with a NaN or an infinity, or None."""
    for name, array in arrays.items():
        if array.dtype.kind == 'f' and not np.isfinite(array).all():
            return name
    return None


def map_array(file: BinaryIO, dtype: type[np.generic]) -> np.ndarray:
    """Map an open .npy of numbers of this type into memory. Raise ValueError for other content, and
    for cut content."""
    shape, is_fortran, found = _read_header(file, os.fstat(file.fileno()).st_size)
    if found != dtype:
        raise ValueError(f'got {found}, expected {np.dtype(dtype)}')
    return np.memmap(file, found, 'r', file.tell(), shape, 'F' if is_fortran else 'C')


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Return the array of a member. Raise ValueError unless its header describes numbers of exactly
    its size."""
    with archive.open(member) as f:
        try:
            shape, is_fortran, dtype = _read_header(f, member.file_size)
        except ValueError as e:
            raise ValueError(f'{member.filename}: {e}') from e
        return np.frombuffer(f.read(), dtype).reshape(shape, order='F' if is_fortran else 'C')


def _read_header(f: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, order and type of the array in a file of `size` bytes. Raise ValueError unless
    it fits exactly."""
    form = np.lib.format
    readers = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}
    try:
        shape, is_fortran, dtype = readers[form.read_magic(f)](f)
    except Exception as e:  # NumPy raises many types for damaged headers
        reason = ' '.join(str(e).split())[:200]
        raise ValueError(
            f'not the header of a .npy 1.0 or 2.0 ({type(e).__name__}: {reason})'
        ) from e
    if dtype.kind not in 'fiub' or dtype.fields:
        raise ValueError(f'got {str(dtype)[:40]}, expected numbers')
    num_bytes = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or num_bytes != size - f.tell():
        raise ValueError(f'got {size - f.tell()} bytes, expected {num_bytes} from its header')
    return shape, is_fortran, dtype
