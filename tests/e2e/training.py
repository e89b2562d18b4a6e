"""Short trainings, and assertions on their results."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
from helpers import CLI, call, under_ranks, wait_for

from mlperf_rn50.data.prepare.pack import pack
from mlperf_rn50.data.prepare.samples import Dataset, digits
from mlperf_rn50.runfolder.jsonl import read_lines
from mlperf_rn50.runfolder.names import newest_step

NUM_TRAIN, NUM_VAL, STEPS_PER_EPOCH = 150, 50, 5
# ResNet-18 to an unreachable target
OPTIONS = f"""
--data.dataset=tiny-digits --data.num_train={NUM_TRAIN} --data.num_val={NUM_VAL}
--data.num_classes=10 --data.image_size=32 --data.resize_shorter=32 --data.crop=padded
--data.num_threads=1 --model.name=resnet18 --model.zero_gamma=true
--optimizer.name=lars --optimizer.lars_eta=0.1
--schedule.base_lr=0.02 --schedule.warmup_epochs=1 --schedule.decay_epochs=4
--train.global_batch_size=32 --train.eval_period=1 --train.target_accuracy=1.0
--train.max_epochs=4 --comm.num_buckets=2 --run.seed=3 --run.metrics_period_steps=1
"""
THIN = [sys.executable, Path(__file__).with_name('thin.py')]
_VOLATILE = (
    'time_s elapsed_parts job images_per_s time_to_train_s peak_flops_per_s checkpoint_s'.split()
)


def pack_tiny(out: Path, num_train: int = NUM_TRAIN) -> Path:
    """Prepare part of the digits in a folder; return the folder."""
    whole = digits()
    train, validation = whole.train[:num_train], whole.validation[:NUM_VAL]
    pack(Dataset('tiny-digits', 'digits', whole.classes, train, validation), out)
    return out


def arguments(run_dir, data_dir, *options) -> list[str]:
    """Return arguments that train with OPTIONS, unless overridden."""
    places = f'--run.dir={run_dir}', f'--data.dir={data_dir}'
    return ['train', *OPTIONS.split(), *places, *options]


def train(run_dir, data_dir, options='') -> subprocess.CompletedProcess:
    """Train with these arguments in this process; options: words without spaces."""
    return call(*arguments(run_dir, data_dir, *options.split()))


def command(run_dir, data_dir, *options) -> list[str]:
    """Return the complete command of a training with these arguments."""
    return [*CLI, *arguments(run_dir, data_dir, *options)]


def thin_ranks(num_ranks, *words) -> list:
    """Return the command that runs the program with thin networks on a number of ranks."""
    return under_ranks(num_ranks, [*THIN, *words])


def metrics(run_dir, event=None, name='metrics.jsonl') -> list[dict]:
    """Return the events in metrics.jsonl without values that differ between equal runs."""
    return [
        {k: v for k, v in m.items() if k not in _VOLATILE}
        for _, m in read_lines(Path(run_dir) / name, dict)
        if (m['event'] == event if event else m['event'] not in ('ranks', 'part'))
    ]


def log_events(run_dir) -> list[dict]:
    """Return the events in the log of a run."""
    lines = (run_dir / 'result_0.txt').read_text().splitlines()
    found = [line.partition(' ') for line in lines]
    return [json.loads(text) for head, _, text in found if head == ':::MLLOG']


def assert_one_line(done, code, *texts) -> None:
    """Assert that an error is one line with some texts, from rank 0 if there are several."""
    assert done.returncode == code and 'Traceback' not in done.stderr, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith('mlperf-rn50:')]
    (line,) = (line for line in errors if 'rank 1' not in line)
    assert all(text in line for text in texts), done.stderr


def assert_aborted(done) -> None:
    """Assert that a run ended below its target, without a failure."""
    is_aborted = 'aborted: the target was not reached' in done.stdout
    assert done.returncode == 1 and is_aborted, done.stderr


def start(words) -> subprocess.Popen:
    """Start a command in a new session."""
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    return subprocess.Popen([str(a) for a in words], **pipes, start_new_session=True)


def wait_for_checkpoint(run_dir, step, process) -> None:
    """Wait until a checkpoint of this step or a later one is written."""
    wait_for(
        lambda: newest_step(run_dir / 'checkpoints') >= step,
        lambda: process.poll() is None,
        process.communicate,
        pause_s=0.01,
    )


def parent_pid(process) -> int | None:
    """Return the parent of a psutil process; None if the process has ended."""
    try:
        return process.ppid()
    except psutil.Error:
        return None
