"""Whether runs that go wrong are told apart from good ones, on digits.

Five reference runs; then five good ones with other seeds, one with a learning rate a fifth of theirs, and one in which
the labels of one of two ranks are shuffled within each of its batches. Runs that are judged end when they are behind.
A step is of two passes of one rank, the second of which has the images of a second rank; or, with --two-ranks, of two
ranks, which takes several times as long where they share few cores.

Usage: python benchmarks/course_digits.py FOLDER [--two-ranks]    (runs that are in FOLDER are not made again)
"""
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
BASE_LR = 0.01
# A network and images so small that a run takes a minute or two; a target that takes it several evaluations.
OPTIONS = ['--config', 'launch/configs/digits_cpu.yaml', '--model.name', 'resnet18', '--data.image_size', '16',
           '--data.resize_shorter', '16', '--train.target_accuracy', '0.95', '--train.num_warmup_steps', '1',
           '--checkpoint.period_epochs', '0']
HAS_TWO_RANKS = '--two-ranks' in sys.argv
PROGRAM = ('-m', 'mlperf_rn50', 'train')


def train_with_shuffled_labels(options: list[str]) -> int:
    """Trains as the program does, but the labels of rank 1, or of every second pass of one rank, are shuffled."""
    import mxnet as mx

    from mlperf_rn50.cli import main
    from mlperf_rn50.data.pipeline import Batch
    from mlperf_rn50.system.launched import launched_rank, launched_size
    from mlperf_rn50.train import start
    batches = start.train_batches

    def shuffled(*arguments):
        for k, b in enumerate(batches(*arguments)):
            is_wrong = launched_rank() == 1 if launched_size() == 2 else k % 2
            labels = mx.nd.random.shuffle(b.labels) if is_wrong else b.labels
            yield Batch(b.images, labels, b.num_valid, b.num_bytes, b.num_new_bytes)
    start.train_batches = shuffled
    return main(['train', *options])


def train(folder: Path, seed: int, base_lr: float, *options: str, program: tuple[str, ...] = PROGRAM) -> Path:
    """A run, to its end."""
    if not (folder / 'metrics.jsonl').exists() or not records(folder, 'end'):
        layout = ['launch/ranks.sh', '2'] if HAS_TWO_RANKS else []
        passes = [] if HAS_TWO_RANKS else ['--train.gradient_accumulation_steps', '2']
        command = [*layout, sys.executable, *program, *OPTIONS, *passes, '--run.dir', str(folder), '--run.seed',
                   str(seed), '--schedule.base_lr', str(base_lr), *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode not in (0, 1) or not records(folder, 'end'):
            raise SystemExit(f'{command}: {done.stderr}')
    return folder


def records(folder: Path, event: str) -> list[dict]:
    """The records of a kind of a run."""
    lines = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    return [record for record in lines if record['event'] == event]


def is_flagged(name: str, folder: Path) -> bool:
    """Says how a run went; whether it was found to be behind."""
    [end], curve = records(folder, 'end'), records(folder, 'eval')
    flagged = next((r['epoch'] for r in records(folder, 'course') if r['behind']), None)
    accuracies = ' '.join(f'{100 * r["num_top1"] / r["num_images"]:.1f}' for r in curve)
    told = f'behind at {flagged}' if flagged else 'never behind'
    print(f'| {name} | {end["status"]} | {curve[-1]["epoch"]} | {told} | {accuracies} |', flush=True)
    return flagged is not None


def main(out: Path) -> int:
    with ThreadPoolExecutor(1 if HAS_TWO_RANKS else 2) as pool:
        references = list(pool.map(lambda k: train(out / f'reference_{k}', k, BASE_LR), range(5)))
        for k, folder in enumerate(references):
            is_flagged(f'reference, seed {k}', folder)
        known = ('--run.reference', *map(str, references), '--run.stop_when_behind', 'true')
        slow = pool.submit(train, out / 'slow', 10, BASE_LR / 5, *known)
        shuffled = pool.submit(train, out / 'shuffled', 11, BASE_LR, *known, program=(__file__, '--shuffled'))
        good = list(pool.map(lambda k: train(out / f'good_{k}', k, BASE_LR, *known), range(5, 10)))
    flags = [is_flagged(f'good, seed {k}', folder) for k, folder in enumerate(good, start=5)]
    found = [is_flagged('learning rate a fifth', slow.result()),
             is_flagged('labels of a rank shuffled', shuffled.result())]
    return 0 if all(found) and not any(flags) else 1


if __name__ == '__main__':
    if sys.argv[1] == '--shuffled':
        sys.exit(train_with_shuffled_labels(sys.argv[2:]))
    sys.exit(main(Path(sys.argv[1]).absolute()))
