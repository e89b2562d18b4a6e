"""What limits a run, from records with planted faults; each step of a healthy rank takes 100 ms."""

import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import ROOT, shipped_logs
from msgspec import structs

from mlperf_rn50.analysis.run_data import RunData, load_run
from mlperf_rn50.analysis.why.bottleneck import Bottleneck, find_bottleneck, times_of
from mlperf_rn50.analysis.why.time_answer import compare_times, explain_time
from mlperf_rn50.cli import main, why
from mlperf_rn50.config import Config
from mlperf_rn50.errors import UserError
from mlperf_rn50.runfolder.jsonl import encode
from mlperf_rn50.runfolder.names import RunFolder, run_at
from mlperf_rn50.runfolder.records import NetworkRecord, RanksRecord, RankSteps
from mlperf_rn50.train.options import TrainConfig

STEPS = 100
NETWORK = NetworkRecord(32, 1e9, 100_000_000, 8, 2e12)
MS = {'data': 1, 'python': 1, 'compute': 90, 'wait': 4, 'update': 4}


def rank_steps(rank: int = 0, **ms: float) -> RankSteps:
    """Return a rank whose steps take a time per phase, in ms; unnamed phases are those of a healthy
    rank."""
    times = {f'{name}_s': STEPS * value / 1000 for name, value in {**MS, **ms}.items()}
    return RankSteps(
        rank=rank,
        host=f'h{rank}',
        cores=f'{rank}',
        num_steps=STEPS,
        spread_s={name: (v / 1000, v / 1000, v / 1000) for name, v in {**MS, **ms}.items()},
        **times,
    )


def made_run(
    *ranks: RankSteps,
    epochs: int = 3,
    network: NetworkRecord | None = NETWORK,
    device: str = 'gpu',
    changed: dict[int, list[RankSteps]] | None = None,
    **record: object,
) -> RunData:
    """Return a run whose clock has no rest; changed: by epoch, other ranks."""
    records, time_s = [], 0.0
    for epoch in range(1, epochs + 1):
        found = RanksRecord(epoch, 0.0, (changed or {}).get(epoch, list(ranks or two())), **record)
        first = found.ranks[0]
        time_s += first.data_s + first.python_s + first.compute_s + first.wait_s + first.update_s
        found.time_s = time_s = time_s + found.eval_s + found.checkpoint_s
        records.append(found)
    return RunData(
        RunFolder(ROOT / 'no-such-folder', 0),
        None,
        [*filter(None, [network]), *records],
        Config(train=TrainConfig(device=device)),
    )


def two(**ms: float) -> list[RankSteps]:
    return [rank_steps(0, **ms), rank_steps(1, **ms)]


def limit_of(run: RunData) -> Bottleneck:
    return find_bottleneck(times_of(run))


@pytest.mark.parametrize(
    ('run', 'name', 'part', 'share'),
    [
        (made_run(*two(data=41, read=35)), 'input', 'storage', 41 / 140),
        (made_run(*two(data=41, decode=35)), 'input', 'decoding', 41 / 140),
        (made_run(*two(data=41, decode=5)), 'input', 'python', 41 / 140),
        (made_run(*two(python=41)), 'python', None, 41 / 140),
        (made_run(*two(wait=64)), 'exchange', 'link', 64 / 160),
        (made_run(*two(wait=64), latency_s=0.005), 'exchange', 'latency', 64 / 160),
        (
            made_run(rank_steps(0, wait=34, slow_rank=30), rank_steps(1, compute=120)),
            'slow_rank',
            None,
            30 / 130,
        ),
        (made_run(eval_s=6.0), 'evaluation', None, 6 / 16),
        (made_run(checkpoint_s=2.0), 'checkpoints', None, 2 / 12),
        (
            made_run(
                *two(compute=20, wait=20), network=NetworkRecord(2, 1e9, 100_000_000, 8, 2e12)
            ),
            'batch',
            None,
            25 / 46,
        ),
        (
            made_run(network=NetworkRecord(32, 1e9, 1, 8, 1e14)),
            'computation',
            None,
            0.9 * (1 - 96 / 0.09 / 1e5),
        ),
        (made_run(), 'healthy', None, 0.04),
    ],
    ids=lambda x: x if isinstance(x, str) else '',
)
def test_each_planted_limit_is_named_with_its_share(run, name, part, share):
    found = limit_of(run)
    assert (found.name, found.part) == (name, part)
    assert found.share == pytest.approx(share, abs=0.001)
    assert found.gain == pytest.approx(1 / (1 - share), rel=0.01)


@pytest.mark.parametrize(('ms', 'name'), [(9, 'healthy'), (11, 'input')])
def test_a_tenth_more_speed_is_the_least_gain_that_is_named(ms, name):
    assert limit_of(made_run(*two(data=ms))).name == name


@pytest.mark.parametrize(('eval_s', 'name'), [(4.2, 'healthy'), (4.4, 'evaluation')])
def test_evaluation_of_three_tenths_of_the_time_is_named(eval_s, name):
    assert limit_of(made_run(eval_s=eval_s)).name == name


def test_exchange_on_the_cores_that_compute_is_healthy_below_three_tenths():
    ranks = two(wait=40)
    assert [limit_of(made_run(*ranks, device=device)).name for device in ('cpu', 'gpu')] == [
        'healthy',
        'exchange',
    ]


def test_slow_link_is_named_also_between_cpus():
    ranks = two(wait=44)
    slow = NetworkRecord(32, 1e9, 5_000_000, 8, 2e12)  # 5 MB in 44 ms: 114 MB/s
    assert limit_of(made_run(*ranks, network=slow, device='cpu')).name == 'exchange'


def test_slow_link_is_named_before_a_small_batch():
    slow = NetworkRecord(2, 1e9, 4_000_000, 8, 2e12)
    assert limit_of(made_run(*two(compute=20, wait=44), network=slow)).name == 'exchange'


def test_python_is_named_before_a_small_batch():
    few = NetworkRecord(2, 1e9, 100_000_000, 8, 2e12)
    assert limit_of(made_run(*two(compute=20, python=60), network=few)).name == 'python'


def test_slow_rank_is_named_with_its_epoch():
    healthy, slow = two(), [rank_steps(0, wait=64, slow_rank=60), rank_steps(1, compute=150)]
    found = limit_of(made_run(*slow, epochs=6, changed={1: healthy, 2: slow, 3: healthy}))
    assert (found.name, found.rank.rank, found.since) == ('slow_rank', 1, 4)


def test_stall_of_ranks_in_turn_counts_as_the_stalling_phase():
    # each stalls for 40 ms in every other step, while the other waits
    ranks = two(python=21, wait=24, slow_rank=20)
    for r in ranks:
        r.critical_s = {'data': 0.05, 'python': 2.05, 'compute': 4.5, 'wait': 0.2, 'update': 0.2}
    found = limit_of(made_run(*ranks))
    assert (found.name, found.rank) == ('python', None)
    assert found.share == pytest.approx(41 / 140)


def test_first_interval_that_was_slow_only_at_its_start_is_left_out():
    first = [replace_spread(r, MS) for r in two(data=100)]
    assert limit_of(made_run(changed={1: first})).name == 'healthy'


def test_first_interval_that_was_slow_throughout_counts():
    assert limit_of(made_run(changed={1: two(data=100)})).name == 'input'


def on_cores(ranks: list[RankSteps], **changes: object) -> list[RankSteps]:
    """Return ranks of one machine that had their cores to themselves, with changed uses of their
    cores."""
    own = {
        'wall_s': 10.0,
        'cpu_s': 9.0,
        'num_cores': 1,
        'num_threads': 1,
        'others_s': 0.5,
        'ready_s': {'compute': (8.0, 0.5), 'exchange': (1.0, 9.0)},
        **changes,
    }
    return [structs.replace(r, host='h0', **own) for r in ranks]


BUSY = {'cpu_s': 2.0, 'others_s': 8.0, 'ready_s': {'compute': (2.0, 6.0)}}


@pytest.mark.parametrize('ms', [{}, {'wait': 300}, {'compute': 10, 'wait': 90, 'python': 9}])
def test_other_programs_on_the_cores_are_named_before_what_they_slow(ms):
    found = limit_of(made_run(*on_cores(two(**ms), **BUSY), device='cpu'))
    assert (found.name, found.also) == ('busy', None)
    text = explain_time(made_run(*on_cores(two(**ms), **BUSY), device='cpu')).sentence
    assert text.startswith(
        'Busy machine: rank 0 (h0, cores 0) got 20 % of its cores, and other programs 80 %; at most'
    )


def test_other_programs_on_a_third_of_the_cores_are_named():
    changes = {
        'cpu_s': 6.8,
        'others_s': 3.2,
        'ready_s': {'compute': (3.1, 2.3), 'exchange': (2.8, 4.1)},
    }
    assert (
        limit_of(made_run(*on_cores(two(compute=20, wait=60), **changes), device='cpu')).name
        == 'busy'
    )


def test_cores_are_named_for_the_rank_that_lacked_them():
    ranks = two()
    found = limit_of(made_run(*on_cores(ranks[:1]), *on_cores(ranks[1:], **BUSY), device='cpu'))
    assert (found.name, found.rank.rank) == ('busy', 1)


@pytest.mark.parametrize(
    'changes',
    [
        {'others_s': 1.1, 'ready_s': {'compute': (6.0, 3.0)}},  # it waited for its own threads
        # which poll, or have a quota
        {'ready_s': {'compute': (1.0, 0.1), 'exchange': (1.0, 9.0), 'input': (0.1, 9.0)}},
        # others use the rest
        {'cpu_s': 9.0, 'others_s': 8.0, 'num_cores': 2, 'ready_s': {'compute': (8.0, 0.1)}},
    ],
)
def test_cores_that_did_not_limit_are_not_named(changes):
    assert limit_of(made_run(*on_cores(two(), **changes), device='cpu')).name == 'healthy'


@pytest.mark.parametrize(
    ('name', 'changes'),
    [
        ('stolen', {'steal_s': 5.0, 'cpu_s': 5.0}),
        ('crowded', {'num_sharing': 2, 'cpu_s': 4.5, 'ready_s': {'compute': (4.0, 4.0)}}),
        # enough for both
        ('exchange', {'num_sharing': 2, 'num_cores': 2, 'ready_s': {'compute': (4.0, 4.0)}}),
        ('crowded', {'num_threads': 8, 'ready_s': {'compute': (4.0, 4.0)}}),
        ('quota', {'cpu_s': 4.0, 'throttled_s': 5.0, 'ready_s': {'compute': (4.0, 4.0)}}),
        (
            'quota',
            {'cpu_s': 4.0, 'throttled_s': 5.0, 'others_s': 5.0, 'ready_s': {'compute': (4.0, 4.0)}},
        ),
        ('busy', {'cpu_s': 2.0, 'others_s': 7.9, 'ready_s': {}}),  # the kernel does not count waits
        ('stopped', {'stopped_s': 5.0}),
    ],
)
def test_lack_of_cores_is_named_with_its_reason(name, changes):
    found = limit_of(made_run(*on_cores(two(wait=60), **changes), device='cpu'))
    assert (found.name, found.also) == (name, None)


def test_what_other_programs_cannot_cause_is_named_besides():
    answer = explain_time(made_run(*on_cores(two(), **BUSY), device='cpu', eval_s=9.0))
    assert (answer.values['verdict'], answer.values['also']) == ('busy', 'evaluation')
    assert answer.sentence.endswith(' Besides, 47 % of the time is evaluation.')


@pytest.mark.parametrize(('queued_s', 'also'), [(6.0, 'slow_rank'), (15.0, None)])
def test_slow_rank_is_named_besides_other_programs_unless_these_slow_it(queued_s, also):
    first = on_cores([rank_steps(0, wait=94, slow_rank=90)], **BUSY)
    second = on_cores(
        [rank_steps(1, compute=180)], **{**BUSY, 'ready_s': {'compute': (2.0, queued_s)}}
    )
    found = limit_of(made_run(*first, *second, device='cpu'))
    assert (found.name, found.also and found.also.name) == ('busy', also)


def test_thin_link_is_named_besides_other_programs():
    thin = NetworkRecord(32, 1e9, 2_500_000, 8, 2e12)
    ranks = [structs.replace(r, host=f'h{r.rank}') for r in on_cores(two(wait=100), **BUSY)]
    found = limit_of(made_run(*ranks, network=thin, device='cpu'))
    assert (found.name, found.also and found.also.name) == ('busy', 'exchange')
    ranks = [structs.replace(r, wait_s=30.0) for r in ranks]
    assert limit_of(made_run(*ranks, network=thin, device='cpu')).also.name == 'busy'  # far smaller


def test_exchange_is_named_before_other_programs_that_took_few_cores():
    few = {
        'cpu_s': 8.5,
        'others_s': 1.5,
        'ready_s': {'compute': (4.0, 0.9), 'exchange': (4.0, 4.0)},
    }
    found = limit_of(made_run(*on_cores(two(wait=200), **few), device='cpu'))
    assert (found.name, found.part, found.also and found.also.name) == ('exchange', 'host', 'busy')


@pytest.mark.parametrize(
    ('ms', 'also'), [({'update': 60, 'wait': 0}, 'batch'), ({'wait': 60}, None)]
)
def test_small_batch_is_named_besides_other_programs_unless_these_slow_its_exchange(ms, also):
    few = NetworkRecord(1, 1e9, 100_000_000, 8, 2e12)
    found = limit_of(made_run(*on_cores(two(**ms), **BUSY), network=few, device='cpu'))
    assert (found.name, found.also and found.also.name) == ('busy', also)


def test_run_that_did_not_record_its_cores_says_nothing_about_them():
    old, new = (explain_time(made_run(*ranks, device='cpu')) for ranks in (two(), on_cores(two())))
    assert (old.values['verdict'], new.values['verdict']) == ('healthy', 'healthy')
    assert len(old.notes) == len(new.notes) + 1 and 'other programs' in old.notes[-1]


def test_slow_cores_of_a_rank_are_named_before_the_exchange_that_they_slow():
    ranks = rank_steps(0, wait=260, slow_rank=60), rank_steps(1, compute=150, wait=200)
    assert limit_of(made_run(*on_cores(ranks), device='cpu')).name == 'slow_rank'


def test_exchange_between_ranks_of_one_host_asks_for_fewer_ranks():
    answer = explain_time(made_run(*on_cores(two(wait=80)), device='cpu'))
    assert (answer.values['verdict'], answer.values['part']) == ('exchange', 'host')
    assert 'fewer ranks' in answer.next_step


def test_run_far_from_its_own_best_steps_is_not_healthy():
    usual, uneven = [0] * 40 + [20, 60, 20], [0] * 40 + [20, 20, 0, 0, 60]
    names = [
        limit_of(made_run(*on_cores(two()), device='cpu', histograms={'compute': bins})).name
        for bins in (usual, uneven)
    ]
    assert names == ['healthy', 'uneven']


def replace_spread(rank: RankSteps, ms: dict[str, float]) -> RankSteps:
    rank.spread_s = {name: (v / 1000, v / 1000, v / 1000) for name, v in ms.items()}
    return rank


def test_epochs_that_a_resume_repeats_count_once():
    run = made_run(*two(data=41))
    again = replace(run, records=[*run.records, *run.records[1:]])
    assert times_of(again) == times_of(run)


def test_rates_follow_from_the_network():
    times = times_of(made_run())
    # a ring of two ranks moves the gradients once
    assert times.bandwidth == pytest.approx(100e6 / 0.004)
    assert times.flops_per_s == pytest.approx(3 * 32e9 / 0.09)
    assert times.peak_share == pytest.approx(3 * 32e9 / 0.09 / 2e12)


@pytest.mark.parametrize(
    'rank',
    [
        RankSteps(rank=0, host='', num_steps=1, data_s=0.0, compute_s=0.0, wait_s=0.0),
        RankSteps(
            rank=0,
            host='',
            num_steps=1,
            data_s=1e-300,
            read_s=1e9,
            decode_s=1e9,
            compute_s=0.0,
            wait_s=0.0,
            slow_rank_s=1e9,
        ),
    ],
)
def test_impossible_times_give_a_verdict(rank):
    record = RanksRecord(1, 0.0, [rank])
    answer = explain_time(RunData(RunFolder(ROOT, 0), records=[record]))
    assert math.isfinite(answer.values['gain'])


@pytest.mark.parametrize(
    'status, action',
    [
        ('running', 'wait for the first one'),
        ('converged', 'train with this version'),
        ('failed', 'train with this'),
    ],
)
def test_run_without_times_of_ranks_is_refused(status, action):
    with pytest.raises(UserError, match=action):
        explain_time(RunData(RunFolder(ROOT, 0), SimpleNamespace(status=status), [NETWORK]))


def test_answer_begins_with_cause_share_and_gain():
    answer = explain_time(made_run(*two(data=41, read=35)))
    assert answer.sentence == (
        '29 % of the time waits for input, mostly for reading record files; at most 1.41 times '
        'as fast without this.'
    )
    assert answer.next_step == 'raise data.record_cache_mib'
    assert ('input: reading record files', '25.0 %', '35.00', '35.00', '35.00') in answer.evidence


def test_shares_of_the_evidence_add_up_to_the_clock():
    rows = explain_time(made_run(*two(data=41, read=35), eval_s=3.0)).evidence
    assert sum(float(row[1].removesuffix(' %')) for row in rows) == pytest.approx(100, abs=0.5)


def test_comparison_names_the_phase_that_changed():
    changed = {k: two(data=11 + 0.1 * k) for k in (1, 2, 3)}
    answer = compare_times(times_of(made_run()), times_of(made_run(changed=changed)))
    assert answer.sentence == (
        'A step takes 110 instead of 100 ms (+10 %); input: preparing in Python +10.2 ms.'
    )


def test_comparison_within_the_noise_names_no_phase():
    noisy = {k: two(compute=90 + 10 * k) for k in (1, 2, 3)}
    answer = compare_times(times_of(made_run()), times_of(made_run(changed=noisy)))
    assert answer.sentence.endswith('no phase changed by more than its noise.')


def test_old_run_gets_what_is_known(capsys):
    assert main(['why', str(shipped_logs() / 'cifar10_five')]) == 0
    assert capsys.readouterr().out.startswith('Healthy: 96 % of the time is forward and backward')


def test_command_prints_json_of_a_run_and_of_two(tmp_path, capsys):
    for name, run in (('a', made_run()), ('b', made_run(*two(python=41)))):
        (tmp_path / name).mkdir()
        shutil.copy(shipped_logs() / 'digits_2ranks/result_0.txt', tmp_path / name)
        (tmp_path / name / 'metrics.jsonl').write_text(
            ''.join(encode(r) + '\n' for r in run.records)
        )
    assert why.run([str(tmp_path / 'b'), '--format', 'json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found['verdict'], found['part'], found['rank']) == ('python', None, None)
    assert why.run([str(tmp_path / 'a'), str(tmp_path / 'b'), '--format', 'json']) == 0
    assert 'Python +40 ms' in json.loads(capsys.readouterr().out)['sentence']


def test_tiny_change_is_not_named():
    answer = compare_times(times_of(made_run()), times_of(made_run(*two(data=1.5))))
    assert answer.sentence.endswith('no phase changed by more than its noise.')


def test_report_page_begins_with_what_limits_the_run(capsys):
    assert main(['report', str(shipped_logs() / 'cifar10_five'), '--format', 'html']) == 0
    assert '<ul class="answers"><li>Healthy: 96 %' in capsys.readouterr().out


def test_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match='expected a run folder'):
        run_at(tmp_path)


def test_newest_run_of_a_folder_is_explained(tmp_path):
    for name in ('result_0.txt', 'result_11.txt', 'result_2.txt', 'result_2_v0.6.txt'):
        (tmp_path / name).touch()
    assert run_at(tmp_path).index == 11
    assert load_run(run_at(tmp_path)) == RunData(RunFolder(tmp_path, 11))
