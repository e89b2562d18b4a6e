"""Flushing the page cache, so that a run reads its data from storage."""
import os
from pathlib import Path

_DROP = Path('/proc/sys/vm/drop_caches')


def drop_page_cache() -> str | None:
    """Flushes this host's page cache; returns None, or why it could not."""
    try:
        os.sync()
        _DROP.write_text('3\n')
    except OSError as e:
        return f'{_DROP}: {e.strerror} (needs root)'
    return None
