"""Writes the decoded images and labels of a prepared folder as arrays that any program reads.

Usage: .venv/bin/python benchmarks/arrays.py DATA OUT    (OUT/{train,validation}_{images,labels}.npy)
"""
import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from mlperf_rn50.config import DataConfig
from mlperf_rn50.data.records import load_manifest, open_split


def main(folder: Path, out: Path) -> None:
    manifest = load_manifest(folder)
    counts = {name: split['num_images'] for name, split in manifest['splits'].items()}
    data = DataConfig(dir=str(folder), dataset=manifest['dataset'], num_train=counts['train'],
                      num_val=counts['validation'], num_classes=len(manifest['classes']))
    out.mkdir(parents=True, exist_ok=True)
    for split, count in counts.items():
        records = open_split(data, split)
        read = [records.read(i) for i in range(count)]
        images = [np.asarray(Image.open(io.BytesIO(r.image.tobytes())).convert('RGB')) for r in read]
        np.save(out / f'{split}_images.npy', np.stack(images))
        np.save(out / f'{split}_labels.npy', np.array([int(r.label) for r in read]))


if __name__ == '__main__':
    main(Path(sys.argv[1]), Path(sys.argv[2]))
