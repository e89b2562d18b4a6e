"""What is published is said before a run starts: where it trains ImageNet, and nowhere else."""
from e2e.training import arguments
from helpers import call

from mlperf_rn50.study import recipe_differences


def test_a_new_run_on_imagenet_warns_before_it_starts(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_differences, 'is_imagenet', lambda config: True)  # 1,281,167 images are not at hand
    done = call(*arguments(tmp_path, tiny, '--train.max_epochs=1'))
    [line] = [x for x in done.stderr.splitlines() if 'published lars set' in x]
    assert 'got 32;' in line and '(the nearest: none)' in line
    assert done.returncode == 1 and line in (tmp_path / 'train.log').read_text().splitlines()
    assert done.stderr.index(line) < done.stderr.index('parameters')
