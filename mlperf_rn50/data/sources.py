"""Where images come from: scikit-learn's digits, CIFAR-10, ImageNet, or folders of pictures."""
from argparse import Namespace
from pathlib import Path

import numpy as np

from mlperf_rn50.data.cifar10 import cifar10
from mlperf_rn50.data.imagenet import imagenet
from mlperf_rn50.data.samples import PICTURES, Dataset, folder_samples, from_pixels, split_folder
from mlperf_rn50.errors import DataError


def digits() -> Dataset:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels; 360 of them, stratified, for validation."""
    import sklearn
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    parts = train_test_split(pixels, bunch.target, test_size=360, stratify=bunch.target, random_state=0)
    train, validation, train_labels, validation_labels = parts
    return Dataset('digits', f'sklearn.datasets.load_digits, scikit-learn {sklearn.__version__}', list('0123456789'),
                   from_pixels(train, train_labels, 'train'),
                   from_pixels(validation, validation_labels, 'validation'))


def folder(source: Path, name: str) -> Dataset:
    """Pictures in <source>/{train,val}/<class>/; classes are numbered by their sorted names."""
    train, validation = split_folder(source, ('train',)), split_folder(source, ('val', 'validation', 'test'))
    if train is None or validation is None:
        raise DataError(f'--source: {source}: expected folders train/ and val/, each with a folder per class')
    classes = sorted(p.name for p in train.iterdir() if p.is_dir())
    result = Dataset(name, str(source), classes, folder_samples(train, classes), folder_samples(validation, classes))
    unknown = sorted(p.name for p in validation.iterdir() if p.is_dir() and p.name not in classes)
    if unknown:
        raise DataError(f'--source: {validation / unknown[0]}: a class that {train} does not have')
    if not result.train or not result.validation:
        raise DataError(f'--source: {source}: no pictures ({", ".join(sorted(PICTURES))}) in train/ or val/')
    return result


def find(options: Namespace, name: str) -> Dataset:
    """The data set that the options of the prepare command mean."""
    source = Path(options.source) if options.source else None
    if options.dataset == 'digits':
        return digits()
    if options.dataset == 'cifar10':
        return cifar10(source)
    if source is None:
        raise DataError(f'--source: missing; say where the images of {options.dataset} are')
    if options.dataset == 'imagenet':
        truth = Path(options.ground_truth) if options.ground_truth else None
        return imagenet(source, truth, options.allow_partial)
    return folder(source, name)
