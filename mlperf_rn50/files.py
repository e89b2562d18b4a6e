"""Writing files so that nothing half-written is ever found."""
import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file so that it is either the old or the new one, whatever happens."""
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    with open(temporary, 'wb') as f:
        f.write(content.encode() if isinstance(content, str) else content)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)


def dump_json(path: Path, content: dict[str, Any]) -> None:
    """Writes an object as indented JSON, in a folder that is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=2) + '\n')
