"""The encrypted archive of an organisation's tree, and its digest.

Source: mlcommons/logging, scripts/pack_submission.sh, whose --unpack and --list read the files.
"""

import os
import subprocess
import tempfile
from pathlib import Path

from mlperf_rn50.errors import UserError
from mlperf_rn50.files import digest_of, refuse_existing, sync_folder


def pack_tree(tree: Path) -> tuple[Path, Path]:
    """Write the encrypted archive of a tree and its SHA-1. openssl asks for the password on the
    terminal.

    The archive names no user of this machine. Raise UserError if a file exists, or if a program
    fails.
    """
    stem = tree.parent / f'mlperf_submission_{tree.name}'
    archive, digest = (stem.with_name(f'{stem.name}.{end}') for end in ('tar.gz', 'sha1'))
    refuse_existing([archive, digest])
    with tempfile.TemporaryDirectory(dir=tree.parent, prefix='.pack-') as place:
        new = Path(place, archive.name)
        _encrypt(tree, new)
        new_digest = Path(place, digest.name)
        sha1 = digest_of(new, 'sha1')  # as the official script; it only detects damage
        new_digest.write_text(f'{sha1}  {archive.name}\n')
        os.rename(new, archive)
        os.rename(new_digest, digest)
    sync_folder(tree.parent)
    return archive, digest


def _encrypt(tree: Path, archive: Path) -> None:
    tar = ['tar', '--create', '--gzip', '--owner=root:0', '--group=root:0', '--file', '-']
    openssl = ['openssl', 'enc', '-e', '-aes256', '-out', str(archive)]
    try:
        with subprocess.Popen(
            [*tar, '--directory', str(tree.parent), f'./{tree.name}'], stdout=subprocess.PIPE
        ) as packed:
            encrypted = subprocess.run(openssl, stdin=packed.stdout)
            assert packed.stdout
            packed.stdout.close()  # a tar without a reader ends
    except OSError as e:
        raise UserError(f'--pack: {e.filename}: {e.strerror}; install it') from e
    if encrypted.returncode or packed.returncode:
        raise UserError(
            f'--pack: openssl ended with exit code {encrypted.returncode}, tar with '
            f'{packed.returncode}; type the same password twice on a terminal'
        )
