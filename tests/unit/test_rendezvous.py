"""The meeting point: whom it answers, where it is, what a rank knows of it; what a launcher says of a rank."""
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from helpers import HANG_LIMIT_S
from hypothesis import given
from hypothesis import strategies as st

from mlperf_rn50.errors import ConfigError, RankLost
from mlperf_rn50.system import addresses, forwarder, meeting, rendezvous
from mlperf_rn50.system.launched import launched_local, launched_rank, launched_size, rank_name

SECRET = 'a-secret'
TASK = {'SLURM_PROCID': '5', 'SLURM_LOCALID': '1', 'SLURM_NODEID': '2', 'SLURM_STEP_NUM_NODES': '4',
        'SLURM_STEP_NUM_TASKS': '8'}
PLACE = {'HOROVOD_RANK': '5', 'HOROVOD_SIZE': '8', 'HOROVOD_LOCAL_RANK': '1', 'HOROVOD_LOCAL_SIZE': '2',
         'HOROVOD_CROSS_RANK': '2', 'HOROVOD_CROSS_SIZE': '4'}


@pytest.fixture(scope='module')
def one_server():
    made = meeting.Server(meeting.StoreHandler, SECRET, is_local=True)
    made.start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def server(one_server):
    wait_until_all_left(one_server)  # a client sees its connection's end before the server has counted it out
    one_server.store.clear()
    yield one_server
    one_server.secret = SECRET


def wait_until_all_left(server):
    deadline = time.monotonic() + HANG_LIMIT_S
    while server._num_open:
        assert time.monotonic() < deadline, server._num_open
        time.sleep(0.001)


def ask(server, method, path='/global_/0', secret=SECRET, body=None):
    return meeting.ask('127.0.0.1', server.port, method, path, secret, body)


def test_the_store_keeps_bytes_until_they_are_taken_back(server):
    assert ask(server, 'GET')[0] == 404
    assert ask(server, 'PUT', body=bytes(range(256))) == (200, b'')
    assert ask(server, 'GET') == (200, bytes(range(256)))
    assert ask(server, 'DELETE')[0] == 200 and ask(server, 'GET')[0] == 404


@pytest.mark.parametrize('secret', [None, 'another', SECRET + 'x', SECRET[:-1], ''])
@pytest.mark.parametrize('method', ['GET', 'PUT', 'DELETE', 'HEAD', 'POST'])
def test_who_does_not_know_the_secret_gets_and_changes_nothing(server, secret, method):
    ask(server, 'PUT', body=b'kept')
    assert ask(server, method, secret=secret, body=b'broken' if method == 'PUT' else None) == (403, b'')
    assert server.store == {'/global_/0': b'kept'}


def test_the_server_shows_that_it_knows_the_secret_without_being_told(server):
    assert meeting.knows('127.0.0.1', server.port, SECRET) is True
    assert meeting.knows('127.0.0.1', server.port, 'another') is False
    with socket.create_server(('127.0.0.1', 0)) as unused:
        port = unused.getsockname()[1]
    assert meeting.knows('127.0.0.1', port, SECRET) is None
    first, second = (ask(server, 'GET', f'/proof/{n}', secret=None)[1] for n in 'ab')
    assert first != second and SECRET.encode() not in first


def send(server, data: bytes) -> bytes:
    with socket.create_connection(('127.0.0.1', server.port), timeout=HANG_LIMIT_S) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        return b''.join(iter(lambda: client.recv(4096), b''))


@pytest.mark.parametrize('request_, status', [
    (b'', b''), (b'\r\n\r\n', b''), (b'\x16\x03\x01\x02\0' * 40 + b'\n', b'400'), (b'GET\r\n\r\n', b'400'),
    (b'PUT /a/b HTTP/1.1\r\nContent-Length: 9\r\n\r\nab', b'403'),
    (b'PUT /a/b HTTP/1.1\r\nAuthorization: Bearer \xff\r\n\r\n', b'403'),
    (b'PUT /a/b HTTP/1.1\r\nAuthorization: Bearer a-secret\r\nContent-Length: -1\r\n\r\n', b'413'),
    (b'PUT /a/b HTTP/1.1\r\nAuthorization: Bearer a-secret\r\nContent-Length: x\r\n\r\n', b'413'),
    (b'PUT /a/b HTTP/1.1\r\nAuthorization: Bearer a-secret\r\nContent-Length: 1048577\r\n\r\n', b'413'),
    (b'PUT /a/b HTTP/1.1\r\nContent-Length: 1048576\r\n\r\n', b'413'),
    (b'PUT /a/b HTTP/1.1\r\nAuthorization: Bearer a-secret\r\nContent-Length: 9\r\n\r\nab', b'400'),
    (b'PUT /' + b'a' * 600 + b' HTTP/1.1\r\nAuthorization: Bearer a-secret\r\n\r\n', b'400'),
    (b'POST /a/b HTTP/1.1\r\nAuthorization: Bearer a-secret\r\n\r\n', b'501')])
def test_garbage_is_refused_without_a_word(server, capfd, request_, status):
    answer = send(server, request_)
    assert (status in answer and b'200' not in answer) if status else not answer
    assert server.store == {} and capfd.readouterr().err == ''


def test_a_full_store_takes_no_more_but_lets_a_value_be_replaced(server, monkeypatch):
    monkeypatch.setattr(meeting, 'MAX_KEYS', 1)
    assert [ask(server, 'PUT', f'/a/{k}', body=b'x')[0] for k in (0, 1, 0)] == [200, 507, 200]


def test_who_says_nothing_neither_blocks_nor_stays(server, monkeypatch, capfd):
    taken = []

    class Limited(meeting._Limited):
        """Only the first has little time."""

        def __init__(self, connection):
            super().__init__(connection)
            self._deadline = time.monotonic() + (HANG_LIMIT_S if taken else 0.3)
            taken.append(connection)
    monkeypatch.setattr(meeting, '_Limited', Limited)
    with socket.create_connection(('127.0.0.1', server.port), timeout=HANG_LIMIT_S) as silent:
        silent.sendall(b'PUT /a/b HT')
        while not taken:
            time.sleep(0.001)
        assert ask(server, 'GET')[0] == 404
        assert silent.recv(100) == b''
    assert capfd.readouterr().err == ''


def test_who_drips_is_cut_off(monkeypatch):
    monkeypatch.setattr(meeting, '_REQUEST_LIMIT_S', 0.0)
    ours, _ = socket.socketpair()
    with pytest.raises(TimeoutError):
        meeting._Limited(ours).readinto(bytearray(1))


def test_one_host_can_hold_only_so_many_connections(server, monkeypatch):
    monkeypatch.setattr(meeting, '_MAX_OPEN_PER_HOST', 1)
    with socket.create_connection(('127.0.0.1', server.port)) as first:
        first.sendall(b'G')
        assert send(server, b'') == b'' and meeting.knows('127.0.0.1', server.port, SECRET) is None
    wait_until_all_left(server)
    assert meeting.knows('127.0.0.1', server.port, SECRET)


def test_a_connection_that_no_thread_takes_is_not_counted(server, monkeypatch, capfd):
    def start(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, 'start', start)
        assert meeting.knows('127.0.0.1', server.port, SECRET) is None
        wait_until_all_left(server)
    assert meeting.knows('127.0.0.1', server.port, SECRET) and "can't start new thread" in capfd.readouterr().err


def test_the_forwarder_says_the_secret_for_its_rank_and_ends_with_it(server):
    code = ('import sys; from mlperf_rn50.system.forwarder import start_forwarder\n'
            f'print(start_forwarder("127.0.0.1", {server.port}, {SECRET!r}), flush=True); sys.stdin.read()')
    rank = subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    port = int(rank.stdout.readline())
    way = subprocess.run(['pgrep', '-P', str(rank.pid)], capture_output=True, text=True).stdout.split()
    assert meeting.ask('127.0.0.1', port, 'PUT', '/a/b', body=b'\0\xff') == (200, b'')
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # meant for the rank
        os.kill(int(way[0]), number)
    assert meeting.ask('127.0.0.1', port, 'GET', '/a/b') == (200, b'\0\xff')
    assert SECRET not in open(f'/proc/{way[0]}/cmdline').read()
    server.secret = 'another'
    assert meeting.ask('127.0.0.1', port, 'GET', '/a/b')[0] == 403
    rank.kill()
    rank.communicate()
    while meeting.knows('127.0.0.1', port, '') is not None:
        pass


TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0100007F:9C40 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        0 2 1 0 20 4 30 10 -1
   2: 0100007F:1F90 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     7        0 3 1 0 20 4 30 10 -1
"""


@pytest.mark.skipif(sys.byteorder != 'little', reason='the table is one of a little-endian machine')
def test_the_user_of_the_other_end_is_found():
    assert forwarder.find_user(TABLE, 40000, 8080) == 1000
    assert forwarder.find_user(TABLE, 40001, 8080) is None and forwarder.find_user('', 1, 2) is None


def test_another_user_is_not_forwarded(server, monkeypatch):
    listener = socket.create_server(('127.0.0.1', 0))
    way = forwarder._Forwarder(listener, '127.0.0.1', server.port, SECRET)
    threading.Thread(target=way.serve_forever, daemon=True).start()
    assert meeting.ask('127.0.0.1', listener.getsockname()[1], 'GET', '/a/b')[0] == 404
    monkeypatch.setattr(forwarder, 'find_user', lambda *_: os.geteuid() + 1)
    with pytest.raises((OSError, meeting.http.client.HTTPException)):
        meeting.ask('127.0.0.1', listener.getsockname()[1], 'GET', '/a/b')
    way.shutdown()
    way.server_close()


def test_addresses_that_lead_to_the_others_are_offered_first():
    own = ['127.0.0.1', '::1', '172.17.0.1', '10.0.0.5', 'fe80::1', 'fd00::5']
    assert addresses.offered_addresses(['127.0.0.1', '10.0.0.5', '10.0.0.5'], own) == [
        '10.0.0.5', '172.17.0.1', 'fd00::5']
    assert addresses.offered_addresses([], ['127.0.1.1']) == []


ADDRESS = st.ip_addresses().map(str)


@given(st.lists(ADDRESS), st.lists(ADDRESS))
def test_what_is_offered_is_own_and_leads_here_from_elsewhere(towards, own):
    got = addresses.offered_addresses(towards, own)
    assert set(got) <= {*towards, *own} and len(set(got)) == len(got)
    assert not any(a.startswith('127.') or a in ('::1', '0.0.0.0', '::') for a in got)
    assert [a for a in got if a in towards] == got[:len(set(got) & set(towards))]


def test_interfaces_are_found_by_address():
    interfaces = {'lo': ['127.0.0.1', '::1'], 'ib0': ['10.0.0.5', 'fd00::5']}
    assert [addresses.interface_of(a, interfaces) for a in ('fd00::5', '127.0.0.1', '10.0.0.6')] == ['ib0', 'lo', None]
    assert addresses.address_towards('127.0.0.1') == '127.0.0.1' and '127.0.0.1' in addresses.find_interfaces()['lo']
    assert addresses.resolve('localhost')[-1] in ('127.0.0.1', '::1') and addresses.resolve('no.such.host.') == []


def test_a_name_that_leads_to_the_loopback_is_not_offered(monkeypatch):
    """As on Debian, where /etc/hosts has the host's own name at 127.0.1.1."""
    names = {'h1': ['127.0.1.1'], 'h2': ['10.0.0.2'], 'h3': []}
    monkeypatch.setattr(rendezvous, 'resolve', names.__getitem__)
    monkeypatch.setattr(rendezvous, 'address_towards', {'127.0.1.1': '127.0.0.1', '10.0.0.2': '10.0.0.1'}.get)
    monkeypatch.setattr(rendezvous, 'find_interfaces', lambda: {'lo': ['127.0.0.1'], 'eth0': ['10.0.0.1', '10.9.9.9']})
    assert rendezvous.offer(['h1', 'h2', 'h3']) == ['10.0.0.1', '10.9.9.9']
    assert rendezvous.offer(['h1']) == ['127.0.0.1']
    monkeypatch.setattr(rendezvous, 'find_interfaces', lambda: {'lo': ['127.0.0.1']})
    with pytest.raises(rendezvous.UserError, match='no network interface but the loopback'):
        rendezvous.offer(['h1', 'h3'])


@pytest.mark.parametrize('found, address, is_refused', [
    (['127.0.1.1'], '10.0.0.1', True), ([], '10.0.0.1', True), (['::1', '10.0.0.2'], 'fd00::1', True),
    (['10.0.0.2'], '10.0.0.1', False), (['127.0.1.1'], '127.0.0.1', False)])
def test_a_host_whose_own_name_leads_nowhere_says_so(found, address, is_refused):
    """Instead of the abort of Gloo on another host, which names neither."""
    if is_refused:
        with pytest.raises(ConfigError, match='h1: got .* for the own name of this host'):
            rendezvous.check_own_name('h1', found, address)
    else:
        rendezvous.check_own_name('h1', found, address)


@pytest.mark.parametrize('env', [TASK, PLACE])
def test_a_rank_knows_its_place_and_the_way_to_the_others(server, env):
    meeting_point = {rendezvous.RENDEZVOUS_VARIABLE: f'no.such.host.,127.0.0.1:{server.port}',
                     meeting.SECRET_VARIABLE: SECRET}
    got = {**env, **rendezvous.rank_variables({**env, **meeting_point})}
    port = int(got.pop('HOROVOD_GLOO_RENDEZVOUS_PORT'))
    assert {k: v for k, v in got.items() if k.startswith('HOROVOD')} == {
        **PLACE, 'HOROVOD_HOSTNAME': platform.node(), 'HOROVOD_CONTROLLER': 'gloo', 'HOROVOD_CPU_OPERATIONS': 'gloo',
        'HOROVOD_GLOO_IFACE': 'lo', 'HOROVOD_GLOO_RENDEZVOUS_ADDR': '127.0.0.1'}
    assert port != server.port and meeting.ask('127.0.0.1', port, 'PUT', '/a/b', body=b'x')[0] == 200
    assert server.store == {'/a/b': b'x'}


@pytest.mark.parametrize('env', [{**TASK, meeting.SECRET_VARIABLE: SECRET}, PLACE,
                                 {rendezvous.RENDEZVOUS_VARIABLE: 'h1:1', meeting.SECRET_VARIABLE: SECRET}])
def test_outside_a_job_of_ours_nothing_is_set(env):
    assert rendezvous.rank_variables(env) == {}


def test_a_rank_without_the_secret_says_so(server, monkeypatch):
    env = {**TASK, rendezvous.RENDEZVOUS_VARIABLE: f'127.0.0.1:{server.port}'}
    with pytest.raises(ConfigError, match='MLPERF_RN50_SECRET: got nothing'):
        rendezvous.rank_variables(env)
    with pytest.raises(RankLost, match='nobody who knows MLPERF_RN50_SECRET answers at 127.0.0.1, port'):
        rendezvous.find_server(['127.0.0.1'], server.port, 'another', limit_s=0)


def test_the_meeting_point_serves_until_nobody_listens():
    command = [sys.executable, '-m', 'mlperf_rn50.system.rendezvous', '1', 'h1']
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True,
                              env={**os.environ, meeting.SECRET_VARIABLE: SECRET})
    host, _, port = server.stdout.readline().strip().rpartition(':')
    assert host == '127.0.0.1' and meeting.knows(host, int(port), SECRET)
    server.stdout.close()
    assert server.wait(HANG_LIMIT_S) == 0
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, meeting.SECRET_VARIABLE: ''})
    assert done.returncode == 2 and done.stdout == '' and 'MLPERF_RN50_SECRET: got nothing' in done.stderr


def test_a_program_is_bound_without_knowing_the_secret(server):
    env = {**os.environ, **PLACE, rendezvous.RENDEZVOUS_VARIABLE: f'127.0.0.1:{server.port}', 'MLPERF_RN50_BIND': 'off',
           meeting.SECRET_VARIABLE: SECRET}
    done = subprocess.run([sys.executable, '-m', 'mlperf_rn50.system.topology', 'env'], env=env, capture_output=True,
                          text=True)
    assert 'HOROVOD_GLOO_RENDEZVOUS_PORT=' in done.stdout and SECRET not in done.stdout


@pytest.mark.parametrize('variables, expected', [
    ({}, (0, None, (0, 1))),
    ({'OMPI_COMM_WORLD_RANK': '3', 'OMPI_COMM_WORLD_SIZE': '8', 'OMPI_COMM_WORLD_LOCAL_RANK': '1',
      'OMPI_COMM_WORLD_LOCAL_SIZE': '2'}, (3, 8, (1, 2))),
    ({'HOROVOD_RANK': '6', 'HOROVOD_SIZE': '8', 'HOROVOD_LOCAL_RANK': '0', 'HOROVOD_LOCAL_SIZE': '4'}, (6, 8, (0, 4))),
])
def test_launchers_say_who_a_rank_is(monkeypatch, variables, expected):
    for name in ('OMPI_COMM_WORLD', 'HOROVOD', 'PMI', 'PMIX'):
        for part in ('RANK', 'SIZE', 'LOCAL_RANK', 'LOCAL_SIZE'):
            monkeypatch.delenv(f'{name}_{part}', raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (launched_rank(), launched_size(), launched_local()) == expected
    assert rank_name() == f'rank {expected[0]} on {platform.node()}'
