"""safe_path: launchers start the program from any folder."""
import os
import sys

from helpers import ROOT, run

SAFE = ROOT / 'mlperf_rn50/launch/safe_path.py'


def test_nothing_is_imported_from_the_start_folder(tmp_path):
    (tmp_path / 'json.py').write_text('raise SystemExit("the folder\'s own json")')
    (tmp_path / 'path').mkdir()
    (tmp_path / 'path/shows.py').write_text('import json, sys; print(sys.argv[1:], __name__)')
    environment = {k: v for k, v in os.environ.items() if k != 'PYTHONSAFEPATH'}
    environment['PYTHONPATH'] = str(tmp_path / 'path')
    done = run([sys.executable, SAFE, 'shows', 'a', '-b'], cwd=tmp_path, env=environment)
    assert (done.returncode, done.stdout) == (0, "['a', '-b'] __main__\n"), done.stderr
    assert 'own json' in run([sys.executable, '-m', 'shows'], cwd=tmp_path, env=environment).stderr
