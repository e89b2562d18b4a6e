"""The options of the data: which files, and the way from them to batches."""
from dataclasses import dataclass
from typing import Literal

from mlperf_rn50.bounds import (
    ABOVE_0,
    FINITE,
    FRACTION,
    FRACTION_ABOVE_0,
    FROM_0,
    FROM_2,
    INT32_FROM_0,
    UP_TO_65535,
    option,
    require,
)

IMAGENET = 'imagenet'


@dataclass(frozen=True)
class DataConfig:
    """The data set and the way from its files to batches.

    Args:
        dir: folder written by `mlperf-rn50 prepare`.
        dataset: name of the data set, shown beside every accuracy.
        num_train: training images; must agree with the manifest in dir.
        num_val: validation images; must agree with the manifest in dir.
        num_classes: classes; must agree with the manifest in dir.
        synthetic: train on made-up images, without any file.
        shuffle: global (every node comes to read all records) or node (each keeps to a part of them for a while).
        node_rotation_epochs: epochs a node keeps the same part with shuffle=node; a part is cold in its first one.
        image_size: side of the square network input, pixels.
        resize_shorter: evaluation: shorter side before the centre crop, pixels.
        crop: training crop: random_resized (area and aspect), padded (shift by up to crop_padding), or none.
        crop_padding: pixels of black border for crop=padded.
        min_area: smallest crop, as a share of the image's area.
        max_area: largest crop, as a share of the image's area.
        min_aspect: smallest width / height of a crop.
        max_aspect: largest width / height of a crop.
        interpolation: resize filter; triangular and lanczos3 average what they shrink, the others do not.
        mirror: random mirrors an image with mirror_probability each time; alternating every other epoch, half of the
            images in the first.
        mirror_probability: chance of a horizontal flip in training.
        mean: per channel, in 0..255.
        std: per channel, in 0..255.
        decoder: cpu, or mixed (nvJPEG, with train.device=gpu).
        hw_decoder_load: decoder=mixed: share of the images for the GPU's own JPEG decoder, where it has one (A100 and
            later).
        hybrid_huffman_threshold: decoder=mixed: images of more pixels have their Huffman codes decoded on the GPU, the
            others on the CPU.
        preallocate_width_hint: decoder=mixed: width of an image that the GPU's JPEG decoder has memory for from the
            start; 0 to allocate as images come.
        preallocate_height_hint: the same for the height.
        device_memory_padding_mib: decoder=mixed: GPU memory that nvJPEG has for each thread from the start.
        host_memory_padding_mib: decoder=mixed: the same for page-locked memory of the host, twice for each thread.
        decoded_bytes_hint: decoder=mixed: GPU memory that each decoded image of a batch has from the start; 0 to
            allocate as images come.
        num_threads: DALI threads of a rank.
        read_threads: threads of a rank that read records from storage.
        record_cache_mib: encoded images that a rank keeps in memory once read, until they fill it, of training and of
            validation each; 0 for none.
        prefetch_depth: batches kept ready.
        pad_to_4_channels: add a channel of zeros, for tensor cores and for bfloat16 on a CPU.
    """

    dir: str = 'data/imagenet'
    dataset: str = IMAGENET
    num_train: int = option(1_281_167, ABOVE_0, 'images')
    num_val: int = option(50_000, ABOVE_0, 'images')
    num_classes: int = option(1000, FROM_2, 'classes')
    synthetic: bool = False
    shuffle: Literal['global', 'node'] = 'global'
    node_rotation_epochs: int = option(10, ABOVE_0, 'epochs')
    image_size: int = option(224, ABOVE_0, 'pixels')
    resize_shorter: int = option(256, ABOVE_0, 'pixels')
    crop: Literal['random_resized', 'padded', 'none'] = 'random_resized'
    crop_padding: int = option(4, FROM_0, 'pixels')
    min_area: float = option(0.05, FRACTION_ABOVE_0, 'fraction')
    max_area: float = option(1.0, FRACTION_ABOVE_0, 'fraction')
    min_aspect: float = option(0.75, ABOVE_0, 'width / height')
    max_aspect: float = option(4 / 3, ABOVE_0, 'width / height')
    interpolation: Literal['nearest', 'linear', 'cubic', 'triangular', 'lanczos3'] = 'linear'
    mirror: Literal['random', 'alternating'] = 'random'
    mirror_probability: float = option(0.5, FRACTION, 'fraction')
    mean: tuple[float, float, float] = option((123.675, 116.28, 103.53), FINITE, '0..255')
    std: tuple[float, float, float] = option((58.395, 57.12, 57.375), ABOVE_0, '0..255')
    decoder: Literal['cpu', 'mixed'] = 'cpu'
    hw_decoder_load: float = option(0.65, FRACTION, 'fraction')
    hybrid_huffman_threshold: int = option(1_000_000, INT32_FROM_0, 'pixels')
    preallocate_width_hint: int = option(0, UP_TO_65535, 'pixels')
    preallocate_height_hint: int = option(0, UP_TO_65535, 'pixels')
    device_memory_padding_mib: int = option(16, UP_TO_65535, 'MiB')
    host_memory_padding_mib: int = option(8, UP_TO_65535, 'MiB')
    decoded_bytes_hint: int = option(0, INT32_FROM_0, 'bytes')
    num_threads: int = option(2, ABOVE_0, 'threads')
    read_threads: int = option(4, ABOVE_0, 'threads')
    record_cache_mib: int = option(0, FROM_0, 'MiB')
    prefetch_depth: int = option(2, ABOVE_0, 'batches')
    pad_to_4_channels: bool = False


def check_data(d: DataConfig) -> None:
    """Raise ConfigError for values that exclude each other."""
    require(d.min_area <= d.max_area,
            f'data.min_area, max_area: got {d.min_area}, {d.max_area}, expected min_area <= max_area')
    require(d.min_aspect <= d.max_aspect,
            f'data.min_aspect, max_aspect: got {d.min_aspect}, {d.max_aspect}, expected min_aspect <= max_aspect')
    require(d.resize_shorter >= d.image_size,
            f'data.resize_shorter: got {d.resize_shorter}, expected at least image_size={d.image_size}')
    require(d.mirror == 'random' or d.mirror_probability == 0.5,
            f'data.mirror: got alternating with mirror_probability={d.mirror_probability}, expected random, or 0.5; '
            'alternating mirrors every image half the time')
