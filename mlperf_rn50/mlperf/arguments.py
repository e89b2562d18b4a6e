"""What a log says between its events: the batch size among the arguments of the program that wrote it."""
import re
from collections.abc import Iterator
from pathlib import Path

_BLOCK_BYTES = 1 << 20
_OVERLAP_BYTES = 200
_MAX_VALUES = 16
# --batch_size=4096, --train-batch-size 4096, batch_size=4096, 'batch_size': 4096; not eval_batch_size, batch_size_x.
_BATCH = re.compile(rb'batch[_-]size\\?[\'"]?(?:\s{0,9}[=:]\s{0,9}|[ \t]{1,9})(\d{1,9})(?![\w.])')
_BEFORE = re.compile(rb'(?<![A-Za-z0-9_])(?<![A-Za-z0-9]-)(?:(?:train|global|total)[_-])?$')


def batch_sizes(path: Path) -> list[tuple[int, int]]:
    """The different batch sizes that stand between the events of a log, each with its first line; none where it
    cannot be read."""
    found: dict[int, int] = {}
    line, rest = 1, b''
    try:
        with open(path, 'rb') as f:
            while block := f.read(_BLOCK_BYTES):
                text = rest + block
                for match in _complete(text, bool(rest), len(block) < _BLOCK_BYTES):
                    if (value := int(match[1])) and value not in found and len(found) < _MAX_VALUES:
                        found[value] = line + text.count(b'\n', 0, match.start())
                rest = text[-_OVERLAP_BYTES:]
                line += text.count(b'\n', 0, len(text) - len(rest))
    except OSError:
        return []
    return list(found.items())


def _complete(text: bytes, has_before: bool, is_last: bool) -> Iterator[re.Match[bytes]]:
    """The matches that neither end of a block cuts; what stands at the start of one was found in the one before."""
    for m in _BATCH.finditer(text):
        is_whole = (m.start() > 20 or not has_before) and (m.end() < len(text) or is_last)
        if is_whole and _BEFORE.search(text[max(0, m.start() - 20):m.start()]):
            yield m
