"""What limits a run, from records with planted faults; each step of a healthy rank takes 100 ms."""

import json
import math
import re
import shutil
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
from helpers import ROOT, call, shipped_logs, table, values, write_files
from msgspec import structs

from mlperf_rn50.analysis.run_data import RunData, load_run
from mlperf_rn50.analysis.why.bottleneck import find_bottleneck, times_of
from mlperf_rn50.analysis.why.time_answer import compare_times, explain_time
from mlperf_rn50.config import Config
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog.elapsed import Resume
from mlperf_rn50.runfolder.jsonl import encode
from mlperf_rn50.runfolder.names import RunFolder, run_at
from mlperf_rn50.runfolder.records import (
    EndRecord,
    NetworkRecord,
    RanksRecord,
    RankSteps,
    ResumedRecord,
)
from mlperf_rn50.train.options import TrainConfig

STEPS = 100
MS = {'data': 1, 'python': 1, 'compute': 90, 'wait': 4, 'update': 4}
NO_FOLDER = RunFolder(ROOT / 'no-such-folder', 0)


def network(images=32, gradient_bytes=100_000_000, peak=2e12):
    return NetworkRecord(images, 1e9, gradient_bytes, 8, peak)


NETWORK = network()


def rank_steps(rank=0, text=''):
    """Return a rank whose steps take a time per phase, in ms; unnamed phases are those of a healthy
    rank."""
    ms = {**MS, **values(text)}
    return RankSteps(
        rank=rank,
        host=f'h{rank}',
        cores=f'{rank}',
        num_steps=STEPS,
        spread_s={name: (v / 1000,) * 3 for name, v in ms.items()},
        **{f'{name}_s': STEPS * v / 1000 for name, v in ms.items()},
    )


def two(text=''):
    """Return two ranks; / separates their times if they differ."""
    first, _, second = text.partition(' / ')
    return [rank_steps(0, first), rank_steps(1, second or first)]


def made_run(ranks=None, epochs=3, net=NETWORK, device='gpu', changed=None, **record):
    """Return a run whose clock has no rest; changed: by epoch, other ranks."""
    records, time_s = [], 0.0
    for epoch in range(1, epochs + 1):
        found = RanksRecord(epoch, 0.0, (changed or {}).get(epoch, ranks or two()), **record)
        first = found.ranks[0]
        time_s += first.data_s + first.python_s + first.compute_s + first.wait_s + first.update_s
        found.time_s = time_s = time_s + found.eval_s + found.checkpoint_s
        records.append(found)
    return RunData(NO_FOLDER, None, [net, *records], Config(train=TrainConfig(device=device)))


def limit_of(*args, **keys):
    """Return the limit of a run, and its name with those of its part and of the limit besides."""
    found = find_bottleneck(times_of(made_run(*args, **keys)))
    return found, (found.name, found.part, found.also and found.also.name)


OWN = 'wall_s=10 cpu_s=9 num_cores=1 num_threads=1 others_s=0.5'
OWN += ' ready_s={"compute":[8,0.5],"exchange":[1,9]} host="h0"'
BUSY = 'cpu_s=2 others_s=8 ready_s={"compute":[2,6]}'


def on_cores(ranks, text=''):
    """Return ranks of one machine that had their cores to themselves, with changed uses of their
    cores."""
    return [structs.replace(r, **{**values(OWN), **values(text)}) for r in ranks]


@pytest.mark.parametrize(
    ('ms', 'keys', 'name', 'share'),
    table("""
data=41 read=35 | | input storage | 41/140
data=41 decode=35 | | input decoding | 41/140
data=41 decode=5 | | input python | 41/140
python=41 | | python | 41/140
wait=64 | | exchange link | 64/160
wait=64 | latency_s=0.005 | exchange latency | 64/160
wait=34 slow_rank=30 / compute=120 | | slow_rank | 30/130
 | eval_s=6.0 | evaluation | 6/16
 | checkpoint_s=2.0 | checkpoints | 2/12
compute=20 wait=20 | net=[2] | batch | 25/46
 | net=[32,1,1e14] | computation | 0.8904
 | | healthy | 0.04
data=9 | | healthy |
data=11 | | input python |
 | eval_s=4.2 | healthy |
 | eval_s=4.4 | evaluation |
wait=40 | | exchange link |
wait=40 | device="cpu" | healthy |
wait=44 | device="cpu" net=[32,5000000] | exchange link |
compute=20 wait=44 | net=[2,4000000] | exchange link |
compute=20 python=60 | net=[2] | python |
update=110 | | update | 110/206
update=90 | | healthy |
"""),
)
def test_each_planted_limit_is_named_with_its_share(ms, keys, name, share):
    """A tenth more speed is the least gain. An exchange is named before a small batch, and on the
    cores that compute only if it is slow: 5 MB in 44 ms are 114 MB/s."""
    keys = values(keys)
    if 'net' in keys:
        keys['net'] = network(*keys['net'])
    found, names = limit_of(two(ms), **keys)
    assert ' '.join(filter(None, names)) == name
    assert explain_time(made_run(two(ms), **keys)).data['next_step'], 'each verdict has its words'
    if share:
        share = float(Fraction(share))
        assert found.share == pytest.approx(share, abs=0.001)
        assert found.gain == pytest.approx(1 / (1 - share), rel=0.01)


def test_first_interval_is_left_out_if_it_was_slow_only_at_its_start():
    started = [structs.replace(r, data_s=10.0) for r in two()]
    for ranks, name in ((started, 'healthy'), (two('data=100'), 'input')):
        assert limit_of(changed={1: ranks})[0].name == name


def test_slow_rank_is_named_with_its_epoch():
    slow = two('wait=64 slow_rank=60 / compute=150')
    found, _ = limit_of(slow, 6, changed={1: two(), 3: two()})
    assert (found.name, found.rank.rank, found.since) == ('slow_rank', 1, 4)


def test_slow_rank_is_named_with_the_first_epoch_of_an_interval_of_several():
    run = made_run(two('wait=64 slow_rank=60 / compute=150'), 4, changed={1: two()})
    every_fourth = [structs.replace(r, epoch=4 * r.epoch) for r in run.all(RanksRecord)]
    found = find_bottleneck(times_of(replace(run, records=[NETWORK, *every_fourth])))
    assert (found.name, found.since) == ('slow_rank', 5)


def test_run_that_mostly_does_something_else_is_not_healthy():
    run = made_run()
    late = [structs.replace(r, time_s=3 * r.time_s) for r in run.all(RanksRecord)]
    answer = explain_time(replace(run, records=[NETWORK, *late])).data
    assert (answer['verdict'], answer['share']) == ('rest', pytest.approx(2 / 3))


def test_stall_of_ranks_in_turn_counts_as_the_stalling_phase():
    # each stalls for 40 ms in every other step, while the other waits
    ranks = two('python=21 wait=24 slow_rank=20')
    for r in ranks:
        r.critical_s = {'data': 0.05, 'python': 2.05, 'compute': 4.5, 'wait': 0.2, 'update': 0.2}
    found, _ = limit_of(ranks)
    assert (found.name, found.rank) == ('python', None)
    assert found.share == pytest.approx(41 / 140)


@pytest.mark.parametrize('ms', ['', 'wait=300', 'compute=10 wait=90 python=9'])
def test_other_programs_on_the_cores_are_named_before_what_they_slow(ms):
    answer = explain_time(made_run(on_cores(two(ms), BUSY), device='cpu'))
    assert (answer.data['verdict'], answer.data['also']) == ('busy', None)
    assert answer.data['sentence'].startswith(
        'Busy machine: rank 0 (h0, cores 0) got 20 % of its cores, and other programs 80 %; at most'
    )


@pytest.mark.parametrize(
    ('name', 'changes'),
    table("""
healthy | others_s=1.1 ready_s={"compute":[6,3]}
healthy | ready_s={"compute":[1,0.1],"exchange":[1,9],"input":[0.1,9]}
healthy | cpu_s=9 others_s=8 num_cores=2 ready_s={"compute":[8,0.1]}
busy | cpu_s=2 others_s=7.9 ready_s={}
stolen | steal_s=5 cpu_s=5
crowded | num_sharing=2 cpu_s=4.5 ready_s={"compute":[4,4]}
exchange | num_sharing=2 num_cores=2 ready_s={"compute":[4,4]}
crowded | num_threads=8 ready_s={"compute":[4,4]}
quota | cpu_s=4 throttled_s=5 ready_s={"compute":[4,4]}
quota | cpu_s=4 throttled_s=5 others_s=5 ready_s={"compute":[4,4]}
stopped | stopped_s=5
"""),
)
def test_lack_of_cores_is_named_with_its_reason(name, changes):
    """The healthy ranks waited for their own threads, poll or have a quota, or left the rest to
    others; two ranks share enough cores if each has two."""
    ranks = two('' if name == 'healthy' else 'wait=60')
    found, _ = limit_of(on_cores(ranks, changes), device='cpu')
    assert (found.name, found.also) == (name, None)


def of_hosts(ranks):
    return [structs.replace(r, host=f'h{r.rank}') for r in ranks]


USES = {
    'own': '',
    'busy': BUSY,
    'third': 'cpu_s=6.8 others_s=3.2 ready_s={"compute":[3.1,2.3],"exchange":[2.8,4.1]}',
    'few': 'cpu_s=8.5 others_s=1.5 ready_s={"compute":[4,0.9],"exchange":[4,4]}',
}


@pytest.mark.parametrize(
    ('ms', 'uses', 'net', 'name', 'also'),
    table("""
wait=94 slow_rank=90 / compute=180 | busy | []        | busy      | slow_rank
wait=100                           | busy | [32,2500000] | busy   | exchange
wait=300                           | busy | [32,2500000] | exchange | busy
compute=20 wait=60                 | third | []       | busy      |
wait=200                           | few  | []        | exchange  | busy
update=60 wait=0                   | busy | [1]       | busy      | batch
wait=60                            | busy | [1]       | busy      |
wait=260 slow_rank=60 / compute=150 wait=200 | own | [] | slow_rank |
"""),
)
def test_limits_besides_other_programs(ms, uses, net, name, also):
    """The others slow an exchange, and the slow cores of a rank slow it, too."""
    ranks = on_cores(two(ms), USES[uses])
    net = json.loads(net)
    if len(net) > 1:
        ranks = of_hosts(ranks)
    _, names = limit_of(ranks, net=network(*net), device='cpu')
    assert names[::2] == (name, also or None)


def test_rank_that_other_programs_slow_is_no_limit():
    slow, other = two('wait=94 slow_rank=90 / compute=180')
    queued_long = f'{BUSY} ready_s={{"compute":[2,15]}}'
    _, names = limit_of(on_cores([slow], BUSY) + on_cores([other], queued_long), device='cpu')
    assert names[::2] == ('busy', None)


def test_cores_are_named_for_the_rank_that_lacked_them():
    first, second = two()
    found, _ = limit_of(on_cores([first]) + on_cores([second], BUSY), device='cpu')
    assert (found.name, found.rank.rank) == ('busy', 1)


def test_run_that_did_not_record_its_cores_says_nothing_about_them():
    old, new = (
        explain_time(made_run(ranks, device='cpu')).data for ranks in (two(), on_cores(two()))
    )
    assert (old['verdict'], new['verdict']) == ('healthy', 'healthy')
    assert len(old['notes']) == len(new['notes']) + 1 and 'other programs' in old['notes'][-1]


def test_exchange_between_ranks_of_one_host_asks_for_fewer_ranks():
    found = explain_time(made_run(on_cores(two('wait=80')), device='cpu')).data
    assert (found['verdict'], found['part']) == ('exchange', 'host')
    assert 'fewer ranks' in found['next_step']


@pytest.mark.parametrize(
    'bins, name', [([20, 60, 20], 'healthy'), ([20, 20, 0, 0, 60], 'uneven')], ids=str
)
def test_run_far_from_its_own_best_steps_is_not_healthy(bins, name):
    histograms = {'compute': [0] * 40 + bins}
    found, _ = limit_of(on_cores(two()), device='cpu', histograms=histograms)
    assert found.name == name


def test_epochs_that_a_resume_repeats_count_once():
    run = made_run(two('data=41'))
    again = replace(run, records=[*run.records, *run.records[1:]])
    assert times_of(again) == times_of(run)


def test_epochs_that_a_resume_discarded_do_not_count_before_they_are_repeated():
    run = made_run(epochs=5, changed={4: two('data=400'), 5: two('data=400')})
    resumed = ResumedRecord(step=STEPS * 3, epoch=3.0)
    assert times_of(replace(run, records=[*run.records, resumed])) == times_of(made_run())


@pytest.mark.parametrize('has_resume', [False, True])
def test_steps_after_the_last_evaluation_are_no_rest(has_resume):
    """A stop 1,000 s after the evaluation; 2 s of them were a checkpoint, which is known."""
    run = made_run()
    end = EndRecord('interrupted', time_to_train_s=1030.0, checkpoint_s=2.0)
    resumed = [ResumedRecord(step=STEPS * 4, epoch=4.0)] if has_resume else []
    times = times_of(replace(run, records=[*run.records, end, *resumed]))
    assert times.parts['rest'] == pytest.approx(0.0, abs=1e-6)
    assert times.parts['checkpoints'] == (0.0 if has_resume else 2.0)


@pytest.mark.parametrize(
    'checkpoint_s',
    [20.0, 25.0, 35.0],
    ids=['at an evaluation', 'after steps of the next epoch', 'without lost steps'],
)
def test_preserved_steps_before_a_resume_and_gaps_are_no_rest(checkpoint_s):
    """The first two epochs take 10 s each, and the third one 10 s after a resume, with a rest."""
    run = made_run()
    resume = Resume(60.0, 35.0, checkpoint_s, clock_s=checkpoint_s, is_pause=False)
    ends = 10.0, 20.0, 80.0
    records = [structs.replace(r, time_s=s) for r, s in zip(run.all(RanksRecord), ends)]
    log = SimpleNamespace(resumes=[resume], evaluations=[])
    times = times_of(replace(run, records=[NETWORK, *records], log=log))
    assert times.parts['rest'] == pytest.approx(10.0)


def test_rates_follow_from_the_network():
    times = times_of(made_run())
    # a ring of two ranks moves the gradients once
    assert times.bandwidth == pytest.approx(100e6 / 0.004)
    hidden = [structs.replace(r, hidden_s=STEPS * 0.076) for r in two()]
    assert times_of(made_run(hidden)).bandwidth == pytest.approx(100e6 / 0.080)
    assert times.peak_share * 2e12 == times.flops_per_s == pytest.approx(3 * 32e9 / 0.09)
    assert 'each rank 1,067 GFLOP/s' in explain_time(made_run()).data['notes'][0]


@pytest.mark.parametrize('section, change', [('train', 'precision'), ('comm', 'compression')])
def test_exchange_in_16_bits_cannot_be_compressed(section, change):
    run = made_run(two('wait=64'))
    assert 'comm.compression' in explain_time(run).data['next_step']
    value = {'precision': 'float16', 'compression': 'fp16'}[change]
    changed = replace(getattr(run.config, section), **{change: value})
    small = replace(run, config=replace(run.config, **{section: changed}))
    assert 'comm.compression' not in explain_time(small).data['next_step']


@pytest.mark.parametrize(
    'num_buckets, num_hosts, step',
    [
        (8, 2, 'lower comm.num_buckets'),
        (1, 2, 'use fewer nodes, or raise train.global_batch_size'),
        (1, 1, 'raise train.global_batch_size'),
    ],
)
def test_exchange_in_one_bucket_cannot_be_joined(num_buckets, num_hosts, step):
    ranks = [structs.replace(r, host=f'h{r.rank % num_hosts}') for r in two('wait=64')]
    net = structs.replace(NETWORK, num_buckets=num_buckets)
    run = made_run(ranks, net=net, latency_s=0.04)
    assert explain_time(run).data['next_step'] == step


@pytest.mark.parametrize(
    'times', [{'data_s': 0.0}, dict.fromkeys(('read_s', 'decode_s', 'slow_rank_s'), 1e9)]
)
def test_impossible_times_give_a_verdict(times):
    times = {'data_s': 1e-300, 'compute_s': 0.0, 'wait_s': 0.0, **times}
    record = RanksRecord(1, 0.0, [RankSteps(rank=0, host='', num_steps=1, **times)])
    assert math.isfinite(explain_time(RunData(NO_FOLDER, records=[record])).data['gain'])


@pytest.mark.parametrize(
    'status, action',
    [('running', 'wait for the first one'), ('failed', 'train with this version')],
)
def test_run_without_times_of_ranks_is_refused(status, action):
    with pytest.raises(UserError, match=action):
        explain_time(RunData(NO_FOLDER, SimpleNamespace(status=status), [network()]))


def test_answer_begins_with_cause_share_and_gain():
    answer = explain_time(made_run(two('data=41 read=35'), eval_s=3.0))
    assert answer.sentences == [
        '24 % of the time waits for input, mostly for reading record files; at most 1.32 times '
        'as fast without this.'
    ]
    assert answer.data['next_step'] == 'raise data.record_cache_mib'
    rows = [[cell.text for cell in row] for row in answer.tables[0].rows]
    assert rows[0] == ['input: reading record files', '20.6 %', '35.00', '35.00', '35.00']
    shares = [float(row[1].removesuffix(' %')) for row in rows]  # of the clock
    assert sum(shares) == pytest.approx(100, abs=0.5)


@pytest.mark.parametrize(
    'keys, found',
    [
        (
            {'changed': {k: two(f'data={11 + 0.1 * k}') for k in (1, 2, 3)}},
            'A step takes 110 instead of 100 ms (+10 %); input: preparing in Python +10.2 ms.',
        ),
        ({'changed': {k: two(f'compute={90 + 10 * k}') for k in (1, 2, 3)}}, 'no phase changed'),
        ({'ranks': two('data=1.5')}, 'no phase changed'),  # a tiny change
        ({'ranks': two('compute=190'), 'epochs': 1}, '(+100 %); no phase can be named'),
    ],
)
def test_comparison_names_a_phase_that_changed_by_more_than_the_noise(keys, found):
    sentence = compare_times(times_of(made_run()), times_of(made_run(**keys))).data['sentence']
    assert found in sentence


def test_long_steps_are_compared_in_whole_milliseconds():
    slow = times_of(made_run(two('compute=2345')))
    sentence = compare_times(times_of(made_run()), slow).data['sentence']
    assert 'takes 2,355 instead of 100 ms' in sentence
    assert 'forward and backward +2,255 ms' in sentence


def test_old_run_gets_what_is_known():
    start, run = (
        'Healthy: 96 % of the time is forward and backward',
        shipped_logs() / 'cifar10_five',
    )
    for words in (['why'], ['report', '--format', 'html']):
        assert start in call(*words, run).stdout


def test_command_prints_json_of_a_run_and_of_two(tmp_path):
    for name, run in (('a', made_run()), ('b', made_run(two('python=41')))):
        (tmp_path / name).mkdir()
        shutil.copy(shipped_logs() / 'digits_2ranks/result_0.txt', tmp_path / name)
        (tmp_path / name / 'metrics.jsonl').write_text(
            ''.join(encode(r) + '\n' for r in run.records)
        )
    one, both = (
        json.loads(call('why', *(tmp_path / n for n in names), '--format', 'json').stdout)
        for names in ('b', 'ab')
    )
    assert (one['verdict'], one['part'], one['rank']) == ('python', None, None)
    assert 'Python +40 ms' in both['sentence'] and both['accuracy'] is None
    assert {*one} == {*both} and both['verdict'] is None


def test_evaluations_of_early_versions_are_those_of_the_log():
    done = call('why', shipped_logs() / 'cifar10_five/result_0.txt')
    assert re.search(r'^evaluation +3\.3 %', done.stdout, re.MULTILINE), done.stdout


def test_newest_run_of_a_folder_is_explained(tmp_path):
    with pytest.raises(UserError, match='expected a run folder'):
        run_at(tmp_path)
    for name in ('result_0.txt', 'result_11.txt', 'result_2.txt', 'result_2_v0.6.txt'):
        (tmp_path / name).touch()
    nested = tmp_path / 'nested'
    write_files(nested / 'first', {'result_0.txt': ''})
    assert run_at(nested).dir == nested / 'first'
    write_files(nested / 'second', {'result_0.txt': ''})
    with pytest.raises(UserError, match='it has the run folders .*first, .*second'):
        run_at(nested)
    assert load_run(run_at(tmp_path)) == RunData(RunFolder(tmp_path, 11))


@pytest.mark.parametrize('name', ['none', 'result_3.txt'])
def test_missing_run_is_named_as_missing(name, tmp_path):
    with pytest.raises(UserError, match=f'{name}: no such file or folder; expected a run folder'):
        run_at(tmp_path / name)
