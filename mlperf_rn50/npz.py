"""Reader of untrusted .npz files. It accepts only numbers and never reads more than the file size."""
import io
import math
import zipfile

import numpy as np

Arrays = dict[str, np.ndarray]


def read_arrays(data: bytes) -> Arrays:
    """Return the arrays of an uncompressed .npz by name. Raise ValueError for other content and non-finite values."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            if any(m.compress_type != zipfile.ZIP_STORED or m.flag_bits & 1 for m in members):
                raise ValueError('got compressed or encrypted arrays, expected uncompressed and unencrypted ones')
            if sum(m.file_size for m in members) > len(data):
                raise ValueError(f'got arrays larger than the {len(data)} bytes of the file')
            arrays = {m.filename.removesuffix('.npy'): _read_array(archive, m) for m in members}
    except (ValueError, MemoryError):  # a lack of memory is no damage
        raise
    except Exception as e:  # zipfile and NumPy raise many types for damaged headers
        raise ValueError(f'not an .npz ({" ".join(str(e).split())[:200] or type(e).__name__})') from e
    if name := find_non_finite(arrays):
        num_bad = int((~np.isfinite(arrays[name])).sum())
        raise ValueError(f'{name}: got {num_bad} non-finite of {arrays[name].size} values, expected none')
    return arrays


def find_non_finite(arrays: Arrays) -> str | None:
    """Return the name of the first array with a NaN or an infinity, or None."""
    return next((n for n, a in arrays.items() if a.dtype.kind == 'f' and not np.isfinite(a).all()), None)


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Return the array of a member. Raise ValueError unless its header describes numbers of exactly its size."""
    name = member.filename
    with archive.open(member) as f:
        version = np.lib.format.read_magic(f)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f'{name}: got .npy version {version}, expected 1.0 or 2.0')
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read_header(f)
        if dtype.kind not in 'fiub' or dtype.fields:
            raise ValueError(f'{name}: got {str(dtype)[:40]}, expected numbers')
        num_bytes = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or num_bytes != member.file_size - f.tell():
            raise ValueError(f'{name}: got {member.file_size - f.tell()} bytes, expected {num_bytes} from its header')
        return np.frombuffer(f.read(), dtype).reshape(shape, order='F' if is_fortran else 'C')
