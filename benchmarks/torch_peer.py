"""PyTorch's side of step.py, digits.py and pipeline.py: a training step, digits to the target, a data loader on a CPU.

Each prints one JSON line. Usage: python torch_peer.py step|digits|loader [OPTIONS]
"""
import argparse
import io
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def conv_norm(in_channels: int, channels: int, kernel: int, stride: int = 1, relu: bool = True) -> list[nn.Module]:
    layers = [nn.Conv2d(in_channels, channels, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(channels)]
    return layers + [nn.ReLU(inplace=True)] * relu


class Unit(nn.Module):
    """A bottleneck of ResNet v1.5."""

    def __init__(self, in_channels: int, channels: int, stride: int, has_projection: bool):
        super().__init__()
        out_channels = 4 * channels
        self.body = nn.Sequential(*conv_norm(in_channels, channels, 1), *conv_norm(channels, channels, 3, stride),
                                  *conv_norm(channels, out_channels, 1, relu=False))
        self.shortcut = nn.Sequential(*conv_norm(in_channels, out_channels, 1, stride, relu=False)) \
            if has_projection else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet50(num_classes: int) -> nn.Module:
    layers, in_channels = [*conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)], 64
    for channels, num_units, stride in STAGES:
        for i in range(num_units):
            layers.append(Unit(in_channels, channels, stride if i == 0 else 1, i == 0))
            in_channels = 4 * channels
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, num_classes))
    for m in net.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight, mode='fan_in')
    return net.to(memory_format=torch.channels_last)


def median_step_s(options: argparse.Namespace) -> float:
    net = resnet50(1000)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=1e-4)
    forward = torch.compile(net) if options.compile else net
    size = (options.batch_size, 3, options.image_size, options.image_size)
    x = torch.rand(size).to(memory_format=torch.channels_last)
    y = torch.arange(options.batch_size) % 1000
    seconds = []
    for _ in range(options.warmup_steps + options.steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast('cpu', torch.bfloat16, enabled=options.precision == 'bfloat16'):
            loss = functional.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[options.warmup_steps:])


def digits_batches(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The pictures and labels that `mlperf-rn50 prepare digits` made, as the demo's pipeline scales them."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16 * 255
    images = functional.interpolate(images, size=(32, 32), mode='bilinear').expand(-1, 3, -1, -1)
    images, labels = ((images - 127.5) / 127.5).contiguous(), torch.tensor(digits.target)
    train, val = train_test_split(np.arange(len(labels)), test_size=360, random_state=0, stratify=digits.target)
    chosen = torch.tensor(train if split == 'train' else val)
    return images[chosen].to(memory_format=torch.channels_last), labels[chosen]


def train_digits(options: argparse.Namespace) -> dict:
    """launch/configs/digits_cpu.yaml: batch 64, learning rate 0.02 after one epoch, polynomial to 12 epochs."""
    torch.manual_seed(options.seed)
    (x, y), (x_val, y_val) = digits_batches('train'), digits_batches('val')
    net = resnet50(10)
    for unit in net.modules():
        if isinstance(unit, Unit):  # as model.zero_gamma
            nn.init.zeros_(unit.body[-1].weight)
    optimizer = torch.optim.SGD(net.parameters(), 0.02, 0.9, weight_decay=1e-4)
    forward = torch.compile(net) if options.compile else net
    batch, steps = 64, -(-len(y) // 64)
    start, step, epoch_s, accuracies = time.perf_counter(), 0, [], []
    for _ in range(12):
        begin, order = time.perf_counter(), torch.randperm(len(y))
        net.train()
        for chosen in order.split(batch):
            progress = (step + 1) / steps
            lr = 0.02 * progress if progress <= 1 else 1e-4 + (0.02 - 1e-4) * (1 - (progress - 1) / 11) ** 2
            optimizer.param_groups[0]['lr'] = lr
            optimizer.zero_grad()
            functional.cross_entropy(forward(x[chosen]), y[chosen]).backward()
            optimizer.step()
            step += 1
        epoch_s.append(time.perf_counter() - begin)
        net.eval()
        with torch.no_grad():
            accuracies.append((net(x_val).argmax(1) == y_val).double().mean().item())
        if accuracies[-1] >= 0.749:
            break
    return {'time_to_train_s': time.perf_counter() - start, 'epochs': len(accuracies), 'top1': accuracies[-1],
            'epoch_s': statistics.median(epoch_s)}


class Photos(torch.utils.data.Dataset):
    """JPEG files: random crop of 5 to 100 % of the area, bilinear to 224, mirrored half the time, normalised."""

    def __init__(self, folder: Path):
        self._paths = sorted(folder.rglob('*.jpg'))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        from PIL import Image
        image = Image.open(io.BytesIO(self._paths[index].read_bytes())).convert('RGB')
        random = np.random.default_rng()
        for _ in range(10):
            area = image.width * image.height * random.uniform(0.05, 1)
            ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
            w, h = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
            if 0 < w <= image.width and 0 < h <= image.height:
                break
        else:
            w, h = image.width, image.height
        x, y = random.integers(image.width - w + 1), random.integers(image.height - h + 1)
        image = image.resize((224, 224), Image.Resampling.BILINEAR, box=(x, y, x + w, y + h))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = (np.asarray(image, np.float32) - np.float32(MEAN)) / np.float32(STD)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def loader_rate(options: argparse.Namespace) -> float:
    loader = torch.utils.data.DataLoader(Photos(Path(options.folder)), options.batch_size, shuffle=True,
                                         num_workers=options.threads, drop_last=True, persistent_workers=True)
    for _ in loader:  # starts the workers and fills the page cache
        pass
    start, count = time.perf_counter(), 0
    for _ in range(3):
        for batch in loader:
            count += len(batch)
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('what', choices=['step', 'digits', 'loader'])
    parser.add_argument('--precision', choices=['float32', 'bfloat16'], default='float32')
    parser.add_argument('--batch-size', type=int, default=32)
    parser.add_argument('--image-size', type=int, default=224)
    parser.add_argument('--warmup-steps', type=int, default=2)
    parser.add_argument('--steps', type=int, default=6)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--compile', action='store_true')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--folder')
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.what == 'step':
        result = {'images_per_s': options.batch_size / median_step_s(options)}
    elif options.what == 'digits':
        result = train_digits(options)
    else:
        result = {'images_per_s': loader_rate(options)}
    print(json.dumps({'peer': f'torch {torch.__version__}', **result}))


if __name__ == '__main__':
    main()
