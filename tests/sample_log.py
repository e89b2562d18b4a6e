"""Logs of runs that never were, written by the real writer."""
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from mlperf_rn50.config import Config, ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from mlperf_rn50.mlperf.writer import RunLog
from mlperf_rn50.model.describe import describe
from mlperf_rn50.model.resnet import ResNet

SGD = Config(run=RunConfig(submission_org='us', submission_platform='here'),
             train=TrainConfig(local_batch_size=8), schedule=ScheduleConfig(base_lr=0.5, warmup_epochs=5))
LARS = replace(SGD, optimizer=OptimizerConfig('lars'))
TENSORS = sorted(n for n, p in ResNet(ModelConfig(), 10).collect_params().items() if p.grad_req != 'null')


def write_run(path, config=SGD, accuracies=(0.1, 0.7595), end='converged', v06=None, cache_clear=True, seed=7,
              batch=64):
    """The log of a run with an evaluation per block of two epochs; end None leaves it cut short.

    Args:
        v06: where the log in the lines of v0.6 goes.
    """
    logs = _logs(config, accuracies, end, cache_clear, seed, batch)
    for place, text in zip((path, v06), logs):
        if place:
            place.write_text(text)
    return path


@cache
def _logs(*arguments):
    """The log for the rules of v0.5 and v0.7+, and that of v0.6.

    The library of v0.5 reads the source of every frame of the stack for every line: in a thread there are few.
    """
    with TemporaryDirectory() as place, ThreadPoolExecutor(1) as pool:
        paths = Path(place, 'log'), Path(place, 'v06')
        pool.submit(_write, *paths, *arguments).result()
        return [p.read_text() for p in paths]


def _write(path, v06, config, accuracies, end, cache_clear, seed, batch):
    log = RunLog(path, v06)
    log.submission(config)
    log.cache_clear(cache_clear, 'a reason')
    log.init_start()
    log.seed(seed)
    log.hyperparameters(config, batch, 8, 1000, 100)
    log.model(describe(config), TENSORS)
    log.init_stop()
    log.run_start()
    log.data(config, 8, 2)
    for block, accuracy in enumerate(accuracies):
        log.block_start(2 * block, 2)
        for epoch in (2 * block, 2 * block + 1):
            log.epoch_start(epoch)
            log.epoch_stop(epoch, 123.4, 0.25)
        log.eval_start(epoch)
        log.eval_stop(epoch, accuracy)
        log.block_stop(2 * block)
    if end:
        log.run_stop(end)
    log.close()
