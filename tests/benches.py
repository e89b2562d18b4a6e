"""Output of mlperf-rn50 bench in JSON, with made-up values."""

STEP = {
    'model': 'resnet50',
    'precision': 'float32',
    'input': 'synthetic',
    'image_size': 224,
    'local_batch_size': 32,
    'num_ranks': 1,
    'num_hosts': 1,
    'step_ms': 300.0,
    'data_ms': 1.0,
    'forward_ms': 90.0,
    'backward_ms': 190.0,
    'all_reduce_ms': 5.0,
    'update_ms': 9.0,
    'num_parameters': 25_557_032,
}
GRADIENTS = {
    'model': 'resnet50',
    'bytes': 100_000_000,
    'time_ms': 800.0,
    'step_ms': 1000.0,
    'local_batch_size': 32,
    'num_ranks': 2,
    'num_hosts': 2,
}


def bench_train(*rows, gpus=(), **machine):
    return {
        'format': 'mlperf-rn50 bench train 1',
        'machine': {'gpus': list(gpus), 'num_hosts': 1, **machine},
        'tables': [{'title': 'Training steps', 'rows': [{**STEP, **r} for r in rows or ({},)]}],
    }


def bench_allreduce(num_ranks=2, num_hosts=2, gpus=(), **row):
    return {
        'format': 'mlperf-rn50 bench allreduce 1',
        'machine': {'gpus': list(gpus), 'num_hosts': num_hosts},
        'tables': [
            {'title': f'All-reduce over {num_ranks} ranks', 'rows': [{'bytes': 4096}]},
            {
                'title': 'The gradients of a step',
                'rows': [{**GRADIENTS, 'num_ranks': num_ranks, 'num_hosts': num_hosts, **row}],
            },
        ],
    }
