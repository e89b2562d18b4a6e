"""What the log says of a run's bits, and that the warm-up comes to every shape of the run."""
from dataclasses import replace

import mxnet as mx
import pytest

from mlperf_rn50.config import Config, DataConfig, ModelConfig, TrainConfig
from mlperf_rn50.data.pipeline import eval_batches, made_up_batches, train_batches
from mlperf_rn50.train import trainer as trainers
from mlperf_rn50.train.comm import LocalComm
from mlperf_rn50.train.evaluate import evaluate
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.trainer import DETERMINISM, device_notes

ENFORCED, AUTOTUNE = 'MXNET_ENFORCE_DETERMINISM', 'MXNET_CUDNN_AUTOTUNE_DEFAULT'
GPU = Config(train=TrainConfig(local_batch_size=4, device='gpu'))


@pytest.mark.parametrize('environ, missing', [
    ({}, f'{ENFORCED}=1 and {AUTOTUNE}=0'), ({ENFORCED: '1', AUTOTUNE: '1'}, f'{AUTOTUNE}=0'), (DETERMINISM, None)])
def test_on_a_gpu_the_same_bits_are_promised_only_where_they_are_asked_for(environ, missing):
    fused, *note = device_notes(GPU, environ)
    assert fused == 'fused operators: none'
    assert note == ([] if missing is None else [
        f'resumed or repeated, this run is not promised to give the same bits; on a GPU that takes {missing}'])
    assert device_notes(replace(GPU, train=TrainConfig(local_batch_size=4)), environ) == []


# --- the warm-up ------------------------------------------------------------------------------------

def watched(net) -> set:
    """Will hold shape and dtype of what a network is given, and whether it is taught."""
    seen = set()
    net.register_forward_pre_hook(
        lambda block, inputs: seen.add((inputs[0].shape, inputs[0].dtype, mx.autograd.is_recording())))
    return seen


@pytest.mark.parametrize('train', [
    {'local_batch_size': 4, 'gradient_accumulation_steps': 2}, {'global_batch_size': 6, 'eval_batch_size': 100}],
    ids=str)
def test_the_warm_up_comes_to_every_shape_of_the_run(thin_resnets, train):
    """19 and 9 images fill no last batch."""
    data = DataConfig(num_train=19, num_val=9, num_classes=3, image_size=16, resize_shorter=16, synthetic=True)
    config = Config(data=data, model=ModelConfig(name='resnet18'), train=TrainConfig(**train))
    plan, comm = make_plan(config, 1), LocalComm()
    trainer = trainers.Trainer(plan, comm, 0, None)
    taught, asked = watched(trainer.net), watched(trainer.eval_net)
    trainer.warm_up(made_up_batches(config, plan.train_shard(), None),
                    next(made_up_batches(config, plan.eval_shard(), None)), 1)
    in_warm_up = set(taught), set(asked)
    assert all(in_warm_up) and in_warm_up[0] != in_warm_up[1]
    taught.clear(), asked.clear()
    batches = train_batches(config, plan.train_shard(), 0, 0, None)
    for step in range(plan.steps_per_epoch):
        trainer.read(trainer.step(batches, step, 0.01, False))
    trainer.average_statistics()
    trainer.fold()
    evaluate(trainer.eval_net, eval_batches(config, plan.eval_shard(), None)(), data.num_val, comm)
    assert (taught, asked) == in_warm_up
