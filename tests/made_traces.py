"""Traced steps with known times."""

from mlperf_rn50.runfolder.jsonl import append
from mlperf_rn50.runfolder.records import RanksRecord, RankSteps, StepSpans


def step(number, at=0.0, slow=0.0, **changes):
    """Return a step of 100 ms whose backward pass ends `slow` seconds after 60 ms; a bucket is
    ready 20 ms before."""
    computed = at + 0.06 + slow
    keys = {
        'start_s': at,
        'asked_s': at + 0.01,
        'arrived_s': at + 0.03,
        'computed_s': computed,
        'exchanged_s': at + 0.09,
        'updated_s': at + 0.1,
        'buckets': [(computed - 0.02, at + 0.085), (computed, at + 0.09)],
    }
    return StepSpans(**{'step': number, **keys, **changes})


def steps(count=20, at=0.0, slow=0.0):
    return [step(k + 1, at + 0.1 * k, slow) for k in range(count)]


def dump(run, rank, spans):
    for span in spans:
        append(run.trace(rank), span)


def ranks_of(*hosts):
    """Return a record with a rank on each host."""
    times = dict.fromkeys(('data_s', 'compute_s', 'wait_s'), 0.0)
    ranks = [RankSteps(rank=k, host=h, num_steps=1, **times) for k, h in enumerate(hosts)]
    return RanksRecord(ranks=ranks)
