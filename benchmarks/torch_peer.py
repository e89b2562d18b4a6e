"""Time training steps of PyTorch, or train with PyTorch to the target; print one JSON line. Started
by compare.py, with options as JSON."""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

# of ResNet-50: channels, units and first stride
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))


def conv_norm(
    in_channels: int, channels: int, kernel: int, stride: int = 1, relu: bool = True
) -> list[nn.Module]:
    conv = nn.Conv2d(in_channels, channels, kernel, stride, kernel // 2, bias=False)
    norm = nn.BatchNorm2d(channels)
    return [conv, norm, nn.ReLU(inplace=True)] if relu else [conv, norm]


class Unit(nn.Module):
    """A bottleneck block of ResNet v1.5."""

    def __init__(self, in_channels: int, channels: int, stride: int, has_projection: bool):
        super().__init__()
        out_channels = 4 * channels
        self.body = nn.Sequential(
            *conv_norm(in_channels, channels, 1),
            *conv_norm(channels, channels, 3, stride),
            *conv_norm(channels, out_channels, 1, relu=False),
        )
        self.shortcut = (
            nn.Sequential(*conv_norm(in_channels, out_channels, 1, stride, relu=False))
            if has_projection
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x), inplace=True)


def make_network(num_classes: int, zero_gamma: bool = False) -> nn.Module:
    """Return ResNet-50, initialised as in `mlperf-rn50`."""
    layers, in_channels = [*conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)], 64
    for channels, num_units, stride in STAGES:
        for i in range(num_units):
            layers.append(Unit(in_channels, channels, stride if i == 0 else 1, i == 0))
            in_channels = 4 * channels
    net = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, num_classes)
    )
    for m in net.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight, mode='fan_in')
        elif isinstance(m, Unit) and zero_gamma:
            nn.init.zeros_(m.body[-1].weight)
    nn.init.normal_(net[-1].weight, std=0.01)
    nn.init.zeros_(net[-1].bias)
    return net.to(memory_format=torch.channels_last)


def step(options: SimpleNamespace) -> dict:
    """Measure the images/s of training steps on one batch in memory.

    Python is a step ahead of a GPU, and the fused update needs no wait for the check of overflow.
    """
    device = 'cuda' if options.device == 'gpu' else 'cpu'
    size, dtype = options.batch_size, getattr(torch, options.precision)
    torch.backends.cudnn.benchmark = True
    net = make_network(1000).to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=1e-4, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    forward = torch.compile(net) if options.compile else net
    x = torch.rand(size, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    y = torch.arange(size, device=device) % 1000
    previous, stamps = torch.zeros(1), []
    for _ in range(options.num_warmup + options.num + 1):
        optimizer.zero_grad()
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = functional.cross_entropy(forward(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        previous.item()
        previous = loss.detach()
        stamps.append(time.perf_counter())
    seconds = np.diff(stamps[options.num_warmup :])
    return {'images_per_s': size / float(np.median(seconds))}


def load_split(folder: Path, split: str, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Load the output of compare.dump_arrays: float32 images of shape (n, 3, side, side) from 0 to
    255, and labels."""
    images = torch.tensor(np.load(folder / f'{split}_images.npy')).permute(0, 3, 1, 2).float()
    if images.shape[-1] != side:
        images = functional.interpolate(images, size=(side, side), mode='bilinear')
    return images, torch.tensor(np.load(folder / f'{split}_labels.npy'))


class Augmentation:
    """Padded crops, mirroring and normalisation, as in `mlperf-rn50`."""

    def __init__(self, data: dict, num_train: int):
        self._data, self._padding = data, data['crop_padding'] if data['crop'] == 'padded' else 0
        self._mean, self._std = (
            torch.tensor(data[key]).reshape(1, 3, 1, 1) for key in ('mean', 'std')
        )
        self._is_first = torch.rand(num_train) < 0.5

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        return ((images - self._mean) / self._std).contiguous(memory_format=torch.channels_last)

    def __call__(self, images: torch.Tensor, chosen: torch.Tensor, epoch: int) -> torch.Tensor:
        images, n, side = images[chosen], len(chosen), images.shape[-1]
        if self._padding:
            padded = functional.pad(images, [self._padding] * 4)
            rows, columns = (
                torch.randint(2 * self._padding + 1, (n, 1)) + torch.arange(side) for _ in range(2)
            )
            images = padded[
                torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]
            ]
            images = images.permute(0, 3, 1, 2)
        if self._data['mirror'] == 'alternating':
            is_mirrored = self._is_first[chosen] ^ bool(epoch % 2)
        else:
            is_mirrored = torch.rand(n) < self._data['mirror_probability']
        return self.normalise(torch.where(is_mirrored[:, None, None, None], images.flip(3), images))


def learning_rate(schedule: dict, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate of a step in the polynomial schedule of `mlperf-rn50`."""
    epochs, warmup = (step + 1) / steps_per_epoch, schedule['warmup_epochs']
    if epochs < warmup:
        return schedule['base_lr'] * epochs / warmup
    progress = min(1.0, (epochs - warmup) / (schedule['decay_epochs'] - warmup))
    end = schedule['end_lr']
    return end + (schedule['base_lr'] - end) * (1 - progress) ** schedule['poly_power']


# Configuration keys of which only these values are supported.
SUPPORTED = {
    'model': {'name': ['resnet50'], 'bn_momentum': [0.9], 'bn_epsilon': [1e-5]},
    'optimizer': {'name': ['sgd'], 'decay_bn_and_bias': [False]},
    'schedule': {'decay': ['poly']},
    'data': {'crop': ['none', 'padded']},
    'train': {'eval_period': [1], 'gradient_accumulation_steps': [1]},
}


class Training:
    """A network with its training step and evaluation."""

    def __init__(self, recipe: dict, options: SimpleNamespace):
        self._recipe, sgd = recipe, recipe['optimizer']
        self.net = make_network(recipe['data']['num_classes'], recipe['model']['zero_gamma'])
        # MXNet's momentum includes the learning rate. So torch's rate is 1, and the step's rate
        # scales loss and decay.
        params = list(self.net.parameters())
        weights = {'params': [p for p in params if p.dim() > 1], 'is_decayed': True}
        others = {'params': [p for p in params if p.dim() <= 1], 'is_decayed': False}
        self._optimizer = torch.optim.SGD(
            [weights, others], 1.0, sgd['momentum'], nesterov=sgd['nesterov'], fused=True
        )
        self._forward = torch.compile(self.net) if options.compile else self.net
        self._autocast = partial(
            torch.autocast, 'cpu', torch.bfloat16, enabled=options.precision == 'bfloat16'
        )

    def loss(
        self, images: torch.Tensor, labels: torch.Tensor, is_valid: torch.Tensor
    ) -> torch.Tensor:
        """Return the mean loss of the valid images."""
        with self._autocast():
            losses = functional.cross_entropy(
                self._forward(images),
                labels,
                reduction='none',
                label_smoothing=self._recipe['train']['label_smoothing'],
            )
        return (losses * is_valid).sum() / is_valid.sum()

    def step(
        self, images: torch.Tensor, labels: torch.Tensor, is_valid: torch.Tensor, lr: float
    ) -> None:
        self._optimizer.zero_grad()
        (lr * self.loss(images, labels, is_valid)).backward()
        for group in self._optimizer.param_groups:
            group['weight_decay'] = (
                lr * self._recipe['optimizer']['weight_decay'] * group['is_decayed']
            )
        self._optimizer.step()

    def num_correct(self, images: torch.Tensor, labels: torch.Tensor, augment: Augmentation) -> int:
        size = self._recipe['train']['eval_batch_size']
        self.net.eval()
        with torch.no_grad(), self._autocast():
            return sum(
                (self._forward(augment.normalise(x)).argmax(1) == y).sum().item()
                for x, y in zip(images.split(size), labels.split(size))
            )

    def try_out(self, run: Callable[[], None]) -> None:
        """Run code that compiles or selects kernels at first use; restore the network
        afterwards."""
        before = {name: value.clone() for name, value in self.net.state_dict().items()}
        state = torch.get_rng_state()
        run()
        self.net.load_state_dict(before)
        self.net.zero_grad()
        torch.set_rng_state(state)


def train(options: SimpleNamespace) -> dict:
    """Train with a configuration of `mlperf-rn50` (see SUPPORTED) to its target."""
    torch.manual_seed(options.seed)
    recipe = options.recipe
    for section, supported in SUPPORTED.items():
        for name, values in supported.items():
            found = recipe[section][name]
            if found not in values:
                raise SystemExit(f'{section}.{name}: got {found}, expected one of {values}')
    data, keys, schedule = recipe['data'], recipe['train'], recipe['schedule']
    load = partial(load_split, Path(options.folder), side=data['image_size'])
    (x, y), validation = load('train'), load('validation')
    augment, training = Augmentation(data, len(y)), Training(recipe, options)
    size = keys['global_batch_size']

    def first_time() -> None:
        first = torch.arange(size) % len(y)
        training.loss(augment(x, first, 0), y[first], torch.ones(size, dtype=torch.bool)).backward()
        training.num_correct(*validation, augment)

    training.try_out(first_time)
    steps, accuracies, start = -(-len(y) // size), [], time.perf_counter()
    for epoch in range(keys['max_epochs'] or int(schedule['decay_epochs'])):
        training.net.train()
        order = torch.randperm(len(y))
        for step in range(steps):
            # The last batch is padded with images of weight 0; the fraction of other images scales
            # the rate.
            positions = step * size + torch.arange(size)
            chosen, is_valid = order[positions % len(y)], positions < len(y)
            lr = learning_rate(schedule, epoch * steps + step, steps) * is_valid.sum().item() / size
            training.step(augment(x, chosen, epoch), y[chosen], is_valid, lr)
        accuracies.append(training.num_correct(*validation, augment) / len(validation[1]))
        if accuracies[-1] >= keys['target_accuracy']:
            break
    return {
        'time_to_train_s': time.perf_counter() - start,
        'epochs': len(accuracies),
        'top1': accuracies,
        'is_converged': accuracies[-1] >= keys['target_accuracy'],
    }


def main() -> None:
    options = SimpleNamespace(**json.loads(sys.argv[1]))
    torch.set_num_threads(2)
    print(json.dumps(step(options) if options.what == 'step' else train(options)))


if __name__ == '__main__':
    main()
