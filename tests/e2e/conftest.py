"""A data set of 200 digits, and trainings on it that take seconds."""
import pytest
from e2e.thin import CHANNELS
from e2e.training import arguments, pack_tiny, thin_ranks
from helpers import run


@pytest.fixture(scope='session')
def tiny(tmp_path_factory):
    """200 of the digits: 5 steps an epoch, the last one padded."""
    return pack_tiny(tmp_path_factory.mktemp('tiny'))


@pytest.fixture(scope='module')
def thin():
    """ResNets of this process with a quarter of the channels: a sixteenth of the memory and time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('mlperf_rn50.model.resnet.STAGE_CHANNELS', CHANNELS)
        yield


@pytest.fixture(scope='session')
def whole_run(tiny, tmp_path_factory):
    """An uninterrupted run of two ranks, to its last epoch: its folder, and how it ended."""
    run_dir = tmp_path_factory.mktemp('whole')
    return run_dir, run(thin_ranks(2, *arguments(run_dir, tiny)))
