"""Options of the data set and the input pipeline."""
from dataclasses import dataclass
from typing import Literal

from mlperf_rn50 import bounds
from mlperf_rn50.bounds import ABOVE_0, FRACTION, FROM_0, UP_TO_65535, option, require

IMAGENET = 'imagenet'


@dataclass(frozen=True)
class DataConfig:
    """Data set and input pipeline.

    Args:
        dir: folder written by `mlperf-rn50 prepare`.
        dataset: name of the data set, shown with every accuracy.
        num_train: number of training images; must match the manifest in dir.
        num_val: number of validation images; must match the manifest in dir.
        num_classes: number of classes; must match the manifest in dir.
        synthetic: train on synthetic images instead of files.
        shuffle: scope of the shuffle: global (every node reads all records over time) or node (each keeps a subset).
        node_rotation_epochs: epochs a node keeps its subset (shuffle=node); it reads a new one from storage.
        image_size: side of the square network input, pixels.
        resize_shorter: shorter side before the centre crop of an evaluation, pixels.
        crop: training crop: random_resized (area and aspect ratio), padded (shift by up to crop_padding) or none.
        crop_padding: width of the black border for crop=padded, pixels.
        min_area: smallest crop, as a fraction of the image area.
        max_area: largest crop, as a fraction of the image area.
        min_aspect: smallest aspect ratio of a crop, width / height.
        max_aspect: largest aspect ratio of a crop, width / height.
        interpolation: resize filter; only triangular and lanczos3 antialias when they shrink an image.
        mirror: random (with mirror_probability) or alternating (every other epoch, half of the images first).
        mirror_probability: probability of a horizontal flip in training.
        mean: mean of each channel, on a scale of 0 to 255.
        std: standard deviation of each channel, on a scale of 0 to 255.
        decoder: JPEG decoder: cpu, or mixed (nvJPEG; needs train.device=gpu).
        hw_decoder_load: fraction of the images for the GPU's hardware JPEG decoder (A100 and later); decoder=mixed.
        hybrid_huffman_threshold: size above which the GPU decodes the Huffman codes, pixels; decoder=mixed.
        preallocate_width_hint: image width preallocated in the hardware decoder (decoder=mixed), pixels; 0: on demand.
        preallocate_height_hint: image height preallocated in it (decoder=mixed), pixels; 0: on demand.
        device_memory_padding_mib: GPU memory that nvJPEG preallocates per thread, MiB; decoder=mixed.
        host_memory_padding_mib: page-locked host memory that nvJPEG preallocates twice per thread, MiB; decoder=mixed.
        decoded_bytes_hint: GPU memory preallocated per decoded image (decoder=mixed), bytes; 0: on demand.
        num_threads: number of DALI threads per rank.
        read_threads: number of threads per rank that read records from storage.
        record_cache_mib: memory per rank for encoded images, separately for training and validation, MiB; 0: none.
        prefetch_depth: number of batches kept ready.
        pad_to_4_channels: add a channel of zeros, for tensor cores and for bfloat16 on a CPU.
    """

    dir: str = 'data/imagenet'
    dataset: str = IMAGENET
    num_train: int = option(1_281_167, ABOVE_0, 'images')
    num_val: int = option(50_000, ABOVE_0, 'images')
    num_classes: int = option(1000, bounds.FROM_2, 'classes')
    synthetic: bool = False
    shuffle: Literal['global', 'node'] = 'global'
    node_rotation_epochs: int = option(10, ABOVE_0, 'epochs')
    image_size: int = option(224, ABOVE_0, 'pixels')
    resize_shorter: int = option(256, ABOVE_0, 'pixels')
    crop: Literal['random_resized', 'padded', 'none'] = 'random_resized'
    crop_padding: int = option(4, FROM_0, 'pixels')
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
    hw_decoder_load: float = option(0.65, FRACTION, 'fraction')
    hybrid_huffman_threshold: int = option(1_000_000, bounds.INT32_FROM_0, 'pixels')
    preallocate_width_hint: int = option(0, UP_TO_65535, 'pixels')
    preallocate_height_hint: int = option(0, UP_TO_65535, 'pixels')
    device_memory_padding_mib: int = option(16, UP_TO_65535, 'MiB')
    host_memory_padding_mib: int = option(8, UP_TO_65535, 'MiB')
    decoded_bytes_hint: int = option(0, bounds.INT32_FROM_0, 'bytes')
    num_threads: int = option(2, ABOVE_0, 'threads')
    read_threads: int = option(4, ABOVE_0, 'threads')
    record_cache_mib: int = option(0, FROM_0, 'MiB')
    prefetch_depth: int = option(2, ABOVE_0, 'batches')
    pad_to_4_channels: bool = False


def check_data(d: DataConfig) -> None:
    """Raise ConfigError for conflicting values."""
    require(d.min_area <= d.max_area,
            f'data.min_area, max_area: got {d.min_area}, {d.max_area}, expected min_area <= max_area')
    require(d.min_aspect <= d.max_aspect,
            f'data.min_aspect, max_aspect: got {d.min_aspect}, {d.max_aspect}, expected min_aspect <= max_aspect')
    require(d.resize_shorter >= d.image_size,
            f'data.resize_shorter: got {d.resize_shorter}, expected at least image_size={d.image_size}')
    require(d.mirror == 'random' or d.mirror_probability == 0.5,
            f'data.mirror_probability: got {d.mirror_probability} with mirror=alternating, expected 0.5')
