"""Writing files so that nothing half-written is ever found."""
import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file so that it is either the old or the new one, whatever happens."""
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    with open(temporary, 'w') as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)
