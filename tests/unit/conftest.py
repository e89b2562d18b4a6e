"""What unit tests share."""
import pytest


@pytest.fixture
def thin_resnets(monkeypatch):
    """ResNets with a quarter of the channels, and all of their layers: a sixteenth of the memory and time."""
    from mlperf_rn50.model import resnet
    monkeypatch.setattr(resnet, 'STAGE_CHANNELS', (16, 32, 64, 128))
