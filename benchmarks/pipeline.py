"""Compare the images/s of the input pipelines of mlperf-rn50, bare DALI and MXNet's
ImageRecordIter, on 2 threads.

They decode 95 KB JPEGs from the page cache, crop them randomly to 224x224, mirror and normalise
them, in batches of 32.
Usage: python benchmarks/pipeline.py [ROUNDS | dali | recorditer]    (dali and recorditer print a single result as JSON)
"""

import json
import sys
import time
from functools import partial

from compare import PYTHON, ROOT, bench, compare, run_json

BATCH, NUM_TRAIN, MEAN, STD = 32, 960, (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
RECORDS = {
    'path': str(ROOT / 'data/photos/train.rec'),
    'index_path': str(ROOT / 'data/photos/train.idx'),
}
EPOCHS = 6


def timed(next_batch) -> float:
    per_epoch = NUM_TRAIN // BATCH
    for _ in range(per_epoch):  # the first epoch fills the queues and the page cache
        next_batch()
    start = time.perf_counter()
    for _ in range(EPOCHS * per_epoch):
        next_batch()
    return EPOCHS * per_epoch * BATCH / (time.perf_counter() - start)


def dali_rate() -> float:
    """Return the images/s of DALI's own reader, random crop and other operators."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=None, prefetch_queue_depth=2)
    def pipeline():
        encoded, labels = fn.readers.mxnet(
            path=[RECORDS['path']],
            index_path=[RECORDS['index_path']],
            random_shuffle=True,
            initial_fill=256,
        )
        images = fn.decoders.image_random_crop(
            encoded,
            output_type=types.RGB,
            random_area=[0.05, 1.0],
            random_aspect_ratio=[0.75, 4 / 3],
        )
        images = fn.resize(
            images, size=[224, 224], interp_type=types.INTERP_LINEAR, antialias=False
        )
        images = fn.crop_mirror_normalize(
            images,
            crop=[224, 224],
            mirror=fn.random.coin_flip(),
            mean=list(MEAN),
            std=list(STD),
            dtype=types.FLOAT,
            output_layout='CHW',
        )
        return images, labels

    pipe = pipeline()
    pipe.build()
    return timed(pipe.run)


def record_iter_rate() -> float:
    """Return the images/s of MXNet's ImageRecordIter."""
    import mxnet as mx

    reader = mx.io.ImageRecordIter(
        path_imgrec=RECORDS['path'],
        path_imgidx=RECORDS['index_path'],
        data_shape=(3, 224, 224),
        batch_size=BATCH,
        shuffle=True,
        preprocess_threads=2,
        prefetch_buffer=2,
        rand_mirror=True,
        random_resized_crop=True,
        min_random_area=0.05,
        max_random_area=1.0,
        min_aspect_ratio=0.75,
        max_aspect_ratio=4 / 3,
        inter_method=1,
        mean_r=MEAN[0],
        mean_g=MEAN[1],
        mean_b=MEAN[2],
        std_r=STD[0],
        std_g=STD[1],
        std_b=STD[2],
    )

    def next_batch():
        try:
            batch = reader.next()
        except StopIteration:
            reader.reset()
            batch = reader.next()
        batch.data[0].wait_to_read()

    return timed(next_batch)


if __name__ == '__main__':
    [what] = sys.argv[1:] or ['']
    if what in ('dali', 'recorditer'):
        print(json.dumps({'images_per_s': dali_rate() if what == 'dali' else record_iter_rate()}))
    else:
        program = partial(
            bench,
            'data',
            '--config',
            'benchmarks/photos.yaml',
            '--batch-sizes',
            BATCH,
            '--caches',
            'warm',
            '--warmup-steps',
            NUM_TRAIN // BATCH,
            '--steps',
            EPOCHS * NUM_TRAIN // BATCH,
        )
        for other, name, rounds, ratio in (
            ('bare DALI', 'dali', 10, 0.95),
            ('ImageRecordIter', 'recorditer', 3, 1.5),
        ):
            bare = partial(run_json, [PYTHON, __file__, name])
            compare(
                f'pipeline against {other}',
                {'mlperf-rn50 bench data': program, other: bare},
                int(what or rounds),
                ratio,
            )
