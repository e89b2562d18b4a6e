"""Hosts of options and hostfiles, their slots, and whether they answer."""

import os
import re
from types import SimpleNamespace

import psutil
import pytest
from helpers import (
    json_table,
    launch_options,
    own_signals,
    prepend_path,
    wait_for,
    write_files,
    write_programs,
)

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.launch import hosts
from mlperf_rn50.launch.helpers import LAUNCHER_SIGNALS
from mlperf_rn50.launch.hosts import (
    RETEST_S,
    Host,
    ReturnTests,
    check_ranks,
    common_slots,
    parse_hostfile,
    parse_hosts,
    silent_hosts,
)
from mlperf_rn50.system.signals import SignalQueue


# hosts: name, slots, and the range of numbers of ranks if it is limited
@pytest.mark.parametrize(
    'text, hosts',
    json_table(r"""
"\u0023 all\nh1 slots=4 \u0023 big\n\nh2 slots=4\n" | [["h1", 4], ["h2", 4]]
"h1\nh1\nh2\nh2\n"       | [["h1", 2], ["h2", 2]]  # a line per rank, as in PBS
"h1:2"                   | [["h1", 2, [2, 3]]]
"h1 slots = 2"           | [["h1", 2]]
"h1 cpu=2"               | [["h1", 2]]
"h1 count=2"             | [["h1", 2]]
"h1 max_slots=4"         | [["h1", null, [1, 5]]]
"h1 max-slots=4 slots=2" | [["h1", 2, [1, 5]]]
"h1 slots=2 slots-max=4" | [["h1", 2, [1, 5]]]
"10.0.0.1\tslots=2\r"    | [["10.0.0.1", 2]]
"""),
)
def test_hostfile_as_other_tools_read_it(text, hosts):
    expected = [Host(name, slots, *(range(*r) for r in limits)) for name, slots, *limits in hosts]
    assert parse_hostfile(text, 'f') == expected


@pytest.mark.parametrize(
    'before, word',
    [
        ('h1 slots=2', 'port=2222'),
        *(('h1', word) for word in 'port=2222 h2 4 slots= slots=04 slots=٤ SLOTS=2 slots'.split()),
        ('h1 slots=2', 'slots=3'),
        ('h1:2', 'slots=3'),
        ('rank', '0=h1'),
    ],
)
def test_word_of_a_hostfile_that_is_not_used_is_refused_by_name(before, word):
    shown = re.escape(ascii(word))
    with pytest.raises(ConfigError, match=f'f: got {shown} in .* remove other words'):
        parse_hostfile(f'h0\n{before} {word}\n', 'f')


def test_ranks_of_hosts_agree_with_each_other_and_with_the_layout():
    exact = Host('h1', 4, range(4, 5))
    assert parse_hosts('h1:4, 10.0.0.1') == [exact, Host('10.0.0.1')]
    [most] = parse_hostfile('h3 max_slots=4', 'f')
    check_ranks([exact, Host('h2'), most, Host('h4', 8)], 4)
    for host, ranks, expected in ((exact, 2, '4'), (exact, 8, '4'), (most, 5, 'at most 4')):
        with pytest.raises(ConfigError, match=f'got {ranks} ranks, expected {expected} as given'):
            check_ranks([host], ranks)
    assert common_slots([Host('h1', 4), Host('h2', 4)]) == 4
    assert common_slots([Host('h1'), Host('h2')]) is common_slots([]) is None
    for slots, text in ((2, '2'), (None, r'\(none\)')):
        with pytest.raises(ConfigError, match=f'slots={text} for h2 and slots=4 for h1'):
            common_slots([Host('h1', 4), Host('h2', slots), Host('h3', slots)])
    for text, advice in (('h1:4,h2:2', 'correct the numbers'), ('h1:4,h2', 'correct')):
        with pytest.raises(ConfigError, match=advice):
            common_slots(parse_hosts(text))


@pytest.mark.parametrize(
    'text, message',
    json_table(r"""
""                | "got nothing, expected host names"
"h1,,h2"          | "got '', expected"
"h1:4,h1:2"       | "got h1 twice"
"-oProxyCommand=x" | "expected a host name or an address"
"me@h1"           | "set the user in ~/.ssh/config"
"fe80::1"         | "give an IPv6 address a name"
"h1:"             | "or NAME:RANKS"
"h1:0"            | "or NAME:RANKS"
"h1:x"            | "or NAME:RANKS"
"h0,n[01-03,7],h2" | "got n[01-03,7], expected"
"h1\nh2"          | "got 'h1\\nh2'"
"""),
)
def test_invalid_hosts_are_refused(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_hosts(text)


def test_hostfile_is_a_file_with_hosts(tmp_path):
    with pytest.raises(ConfigError, match='got no host'):
        parse_hostfile('# none\n\n', 'f')
    (tmp_path / 'hosts').write_text('h1 slots=2\n')
    options = launch_options('--hostfile', tmp_path / 'hosts', '--hosts', 'h2')
    assert options.hosts == [Host('h1', 2), Host('h2')]
    os.mkfifo(tmp_path / 'pipe')
    with pytest.raises(ConfigError, match='--hostfile: cannot read .*/pipe: got a named pipe'):
        launch_options('--hostfile', tmp_path / 'pipe')


def test_hosts_without_an_answer_have_the_reasons_of_ssh(tmp_path, monkeypatch):
    here = ['localhost', os.uname().nodename]
    with monkeypatch.context() as context:
        context.setenv('PATH', '')
        assert silent_hosts([*here, 'h9'], None) == {'h9': 'ssh: not found'}
        assert silent_hosts([], None) == {}
    ssh = """case $6 in
h1) exit;; h2) echo Banner >&2; echo "ssh: no route" >&2; exit 255;; *) exit 1;; esac"""
    write_programs(tmp_path, ssh=ssh)
    prepend_path(monkeypatch, tmp_path)
    with own_signals():
        signals = SignalQueue(LAUNCHER_SIGNALS)
        silent = silent_hosts([*here, 'h1', 'h2', 'h3'], signals)
    assert silent == {'h2': 'ssh: no route', 'h3': ''}


def has_ended(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def has_ended_or_hangs(process):
    return has_ended(process) or process.name() == 'sleep'


@pytest.fixture
def tested(tmp_path, monkeypatch):
    """Function that makes the next test of excluded hosts; returns those that have returned.

    A host answers if tmp_path has a file with its name; the login of h9 hangs.
    """
    ssh = f'[ $6 != h9 ] || exec sleep 600; $7 && [ -e {tmp_path}/$6 ]'
    write_programs(tmp_path, ssh=ssh)
    prepend_path(monkeypatch, tmp_path)
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(hosts, 'time', clock)
    tests = ReturnTests()

    def tested(*names):
        clock.now += RETEST_S
        before = psutil.Process().children()  # those that have not ended hang
        found = tests.returned(names)  # starts the tests, or kills those that hang
        wait_for(lambda: all(map(has_ended, before)))
        wait_for(lambda: all(map(has_ended_or_hangs, psutil.Process().children())))
        return found | tests.returned(names)

    return tested


def test_hosts_have_returned_once_one_has_answered_twice_in_a_row(tested, tmp_path):
    names = 'h2', 'h3', 'h4'
    write_files(tmp_path, {'h2': ''})
    assert tested(*names) == set()
    (tmp_path / 'h2').unlink()
    write_files(tmp_path, {'h3': ''})
    assert tested(*names) == set()
    write_files(tmp_path, {'h4': ''})
    assert tested(*names) == {'h3', 'h4'}
    assert tested('h2', 'h4') == set()  # a host that was taken back counts from the beginning


def test_login_that_hangs_delays_the_return_of_others_only_to_the_next_test(tested, tmp_path):
    write_files(tmp_path, {'h2': ''})
    found = [tested('h2', 'h9') for _ in range(4)]  # every second one kills the login
    assert {'h2'} in found and {'h9'} not in found
