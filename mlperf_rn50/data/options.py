"""Options for the data set and the input pipeline."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlperf_rn50 import bounds
from mlperf_rn50.bounds import (
    ABOVE_0,
    FRACTION,
    FROM_0,
    THREADS,
    UP_TO_65535,
    free_option,
    option,
    refuse,
)
from mlperf_rn50.files import parse_json, read_text

IMAGENET = 'imagenet'
NUM_IMAGENET = 1_281_167, 50_000  # its images for training and validation
MANIFEST_NAME = 'manifest.json'  # in the folder written by prepare
MAX_MANIFEST_BYTES = 1 << 28  # large, because a manifest lists every skipped image


@dataclass(frozen=True)
class DataConfig:
    """Data set and input pipeline.

    Args:
        dir: folder written by `mlperf-rn50 prepare`.
        dataset: name of the data set, shown next to every accuracy; if not set, that of the
            manifest in dir.
        num_train: number of training images; if not set, that of the manifest in dir, which must
            match.
        num_val: number of validation images; if not set, that of the manifest in dir, which must
            match.
        num_classes: number of classes; if not set, that of the manifest in dir, which must match.
        synthetic: train and evaluate on synthetic images instead of files.
        shuffle: global shuffles all records over all nodes; node gives each node a subset of its
            own to shuffle.
        node_rotation_epochs: epochs for which a node keeps its subset before it reads another one
            (shuffle=node).
        last_batch: partly filled last batch of an epoch: weight scales its learning rate; wrap
            fills it with images, as the closed division requires.
        image_size: side of the square network input, pixels.
        sizes: side of training images in each epoch from the first one on, pixels; later epochs
            have the last one. If not set, it is image_size. Shifts of crop=padded are in pixels of
            image_size, before the image is shrunk.
        eval_size: side of evaluation images, pixels; null means image_size.
        eval_flip: evaluate the mean of the logits of each image and of its mirror image.
        resize_shorter: shorter side to which evaluation images are resized before the centre crop,
            pixels.
        crop: training crop: random_resized (random area and aspect ratio), padded (random shift) or
            none.
        crop_padding: width of the black border and maximum shift for crop=padded, pixels.
        min_area: smallest area of a crop, as a fraction of the image area.
        max_area: largest area of a crop, as a fraction of the image area.
        min_aspect: smallest aspect ratio of a crop, width / height.
        max_aspect: largest aspect ratio of a crop, width / height.
        interpolation: resize filter; only triangular and lanczos3 antialias when they shrink an
            image.
        mirror: horizontal flips in training: random, or alternating (each image in every other
            epoch).
        mirror_probability: probability of a horizontal flip with mirror=random.
        mean: mean of each channel, on a scale of 0 to 255.
        std: standard deviation of each channel, on a scale of 0 to 255.
        decoder: JPEG decoder: cpu, or mixed (nvJPEG; needs train.device=gpu).
        hw_decoder_load: fraction of the images decoded by the GPU's JPEG hardware (A100 and later;
            decoder=mixed); null selects 0 for crop=random_resized in training, which decodes only
            the crop, otherwise 0.65.
        hybrid_huffman_threshold: image size above which the GPU decodes the Huffman codes
            (decoder=mixed), pixels.
        preallocate_width_hint: image width for which JPEG hardware memory is reserved
            (decoder=mixed); 0: on demand.
        preallocate_height_hint: image height for which JPEG hardware memory is reserved
            (decoder=mixed); 0: on demand.
        device_memory_padding_mib: GPU memory that nvJPEG preallocates per thread (decoder=mixed),
            MiB.
        host_memory_padding_mib: size of the two page-locked buffers that nvJPEG allocates per
            thread (decoder=mixed).
        decoded_bytes_hint: GPU memory preallocated per decoded image (decoder=mixed), bytes; 0
            allocates it on demand.
        num_threads: number of DALI threads per rank.
        read_threads: number of threads per rank that read records from storage.
        record_cache_mib: memory per rank to cache encoded training images, and as much for
            validation; 0 for none.
        prefetch_depth: number of batches kept ready, in training multiplied by
            input_batch_multiplier.
        input_batch_multiplier: number of training batches that DALI prepares at once, for small
            batches on a GPU.
        pad_to_4_channels: add a channel of zeros to images, and one of weights to the first
            convolution, for speed on tensor cores. With null, weights keep three channels; with
            bfloat16 on a CPU, a ResNet's first convolution then pads both itself, which changes no
            result.
    """

    dir: str = free_option('data/imagenet')
    dataset: str = IMAGENET
    num_train: int = option(NUM_IMAGENET[0], ABOVE_0, 'images')
    num_val: int = option(NUM_IMAGENET[1], ABOVE_0, 'images')
    num_classes: int = option(1000, bounds.FROM_2, 'classes')
    synthetic: bool = False
    shuffle: Literal['global', 'node'] = 'global'
    node_rotation_epochs: int = option(10, ABOVE_0, 'epochs')
    last_batch: Literal['weight', 'wrap'] = 'weight'
    image_size: int = option(224, bounds.SIDE, 'pixels')
    sizes: tuple[int, ...] = option((), bounds.SIDE, 'pixels')
    eval_size: int | None = option(None, bounds.SIDE, 'pixels')
    eval_flip: bool = False
    resize_shorter: int = option(256, bounds.SIDE, 'pixels')
    crop: Literal['random_resized', 'padded', 'none'] = 'random_resized'
    crop_padding: int = option(4, bounds.MARGIN, 'pixels')
    min_area: float = option(0.05, bounds.FRACTION_ABOVE_0, 'fraction')
    max_area: float = option(1.0, bounds.FRACTION_ABOVE_0, 'fraction')
    min_aspect: float = option(0.75, ABOVE_0, 'width / height')
    max_aspect: float = option(4 / 3, ABOVE_0, 'width / height')
    interpolation: Literal['nearest', 'linear', 'cubic', 'triangular', 'lanczos3'] = 'linear'
    mirror: Literal['random', 'alternating'] = 'random'
    mirror_probability: float = option(0.5, FRACTION, 'fraction')
    mean: tuple[float, float, float] = option((123.675, 116.28, 103.53), bounds.FINITE, '0..255')
    std: tuple[float, float, float] = option((58.395, 57.12, 57.375), ABOVE_0, '0..255')
    decoder: Literal['cpu', 'mixed'] = 'cpu'
    hw_decoder_load: float | None = free_option(None, FRACTION, 'fraction')
    hybrid_huffman_threshold: int = free_option(1_000_000, bounds.INT32_FROM_0, 'pixels')
    preallocate_width_hint: int = free_option(0, UP_TO_65535, 'pixels')
    preallocate_height_hint: int = free_option(0, UP_TO_65535, 'pixels')
    device_memory_padding_mib: int = free_option(16, UP_TO_65535, 'MiB')
    host_memory_padding_mib: int = free_option(8, UP_TO_65535, 'MiB')
    decoded_bytes_hint: int = free_option(0, bounds.INT32_FROM_0, 'bytes')
    num_threads: int = free_option(2, THREADS, 'threads')
    read_threads: int = free_option(4, THREADS, 'threads')
    record_cache_mib: int = free_option(0, FROM_0, 'MiB')
    prefetch_depth: int = free_option(2, ABOVE_0, 'batches')
    input_batch_multiplier: int = free_option(1, ABOVE_0, 'batches')
    pad_to_4_channels: bool | None = None

    @property
    def is_imagenet(self) -> bool:
        """Whether the images are those of ImageNet, all of them."""
        is_whole = (self.num_train, self.num_val) == NUM_IMAGENET
        return self.dataset == IMAGENET and is_whole and not self.synthetic

    def size_of(self, epoch: int = 0) -> int:
        """Return the side of the training images of an epoch, counted from 0, in pixels."""
        return self.sizes[min(epoch, len(self.sizes) - 1)] if self.sizes else self.image_size


def check_data(d: DataConfig) -> None:
    """Raise ConfigError if values conflict with each other."""
    refuse(
        d.min_area > d.max_area,
        f'data.min_area, max_area: got {d.min_area}, {d.max_area}, expected min_area <= max_area',
    )
    refuse(
        d.min_aspect > d.max_aspect,
        f'data.min_aspect, max_aspect: got {d.min_aspect}, {d.max_aspect}, expected min_aspect <= '
        'max_aspect',
    )
    name, side = ('eval_size', d.eval_size) if d.eval_size else ('image_size', d.image_size)
    refuse(
        d.resize_shorter < side,
        f'data.resize_shorter: got {d.resize_shorter}, expected at least {name}={side}',
    )
    refuse(
        d.mirror == 'alternating' and d.mirror_probability != 0.5,
        f'data.mirror_probability: got {d.mirror_probability} with mirror=alternating, expected '
        '0.5',
    )


def read_manifest(folder: Path) -> Any:
    """Return the content of a prepared folder's manifest, which is not checked.

    Raise OSError or ValueError if it cannot be read. data.recordio.load_manifest checks it.
    """
    return parse_json(read_text(folder / MANIFEST_NAME, MAX_MANIFEST_BYTES))
