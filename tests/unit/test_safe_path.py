"""Launchers start the program from any folder, whatever lies there."""
import os
import sys

from helpers import ROOT, run

SAFE = ROOT / 'mlperf_rn50/safe_path.py'


def test_nothing_is_imported_from_the_folder_a_launcher_is_started_in(tmp_path):
    (tmp_path / 'json.py').write_text('raise SystemExit("the folder\'s own json")')
    environment = {k: v for k, v in os.environ.items() if k != 'PYTHONSAFEPATH'}

    done = run([sys.executable, SAFE, 'json.tool', '--help'], cwd=tmp_path, env=environment)

    assert done.returncode == 0 and 'usage' in done.stdout, done.stderr
    assert 'own json' in run([sys.executable, '-m', 'json.tool', '--help'], cwd=tmp_path, env=environment).stderr


def test_a_module_has_its_own_arguments(tmp_path):
    (tmp_path / 'shows.py').write_text('import sys; print(sys.argv[1:], __name__)')

    done = run([sys.executable, SAFE, 'shows', 'a', '-b'], cwd='/', env={**os.environ, 'PYTHONPATH': str(tmp_path)})

    assert done.stdout == "['a', '-b'] __main__\n"
