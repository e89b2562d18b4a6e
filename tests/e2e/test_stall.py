"""A run that stands still: it ends and says who waits for whom."""
from e2e.training import arguments, thin_ranks
from helpers import run


def test_a_rank_whose_data_does_not_come_is_named_by_the_one_that_waits(tiny, tmp_path):
    options = ['--comm.stall_limit_s=8', '--checkpoint.period_epochs=0']
    done = run(thin_ranks(2, '--stuck', *arguments(tmp_path, tiny, *options)))
    assert done.returncode == 1
    [folder] = (tmp_path / 'stalled').iterdir()
    assert 'step 7, training: no progress for ' in done.stderr
    assert ' s (comm.stall_limit_s): waiting in the exchange of step 8 for rank 1 on ' in done.stderr
    assert '(busy: reading data); its stacks: ' in done.stderr
    assert f'its stacks: {folder}/rank_0.txt' in done.stderr
    assert 'asnumpy' in (folder / 'rank_0.txt').read_text() and 'stuck' in (folder / 'rank_1.txt').read_text()
