"""Coverage-guided fuzzer of the log reader: python tests/fuzz_reader.py [libFuzzer options]
[CORPUS]"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=['mlperf_rn50']):
    from invariants import check_report, check_run

FILE = Path(tempfile.mkdtemp()) / 'result_0.txt'


def fuzz(data: bytes) -> None:
    """Check the invariants for one input."""
    FILE.write_bytes(data)
    if check_run(FILE):
        check_report(FILE)


if __name__ == '__main__':
    atheris.Setup(sys.argv, fuzz)
    atheris.Fuzz()
