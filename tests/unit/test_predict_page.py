"""docs/predict.md shows what its commands print."""
import re
import shlex

import pytest
from helpers import ROOT, call

PAGE = (ROOT / 'docs/predict.md').read_text()
SHOWN = re.findall(r'```bash\nmlperf-rn50 (predict [^\n]*?)(?: +#[^\n]*)?\n```\n\n```text\n(.*?)\n```', PAGE, re.DOTALL)


@pytest.mark.parametrize('command, text', SHOWN, ids=[c[:40] for c, _ in SHOWN])
def test_the_page_shows_what_the_command_prints(command, text):
    assert call(*shlex.split(command)).stdout.rstrip() == text, f'copy what mlperf-rn50 {command} prints'


def test_the_page_shows_a_prediction_and_the_errors():
    assert [c.split()[1] for c, _ in SHOWN] == ['v0.7/NVIDIA/dgxa100_ngc20.06_mxnet', '--validate']
