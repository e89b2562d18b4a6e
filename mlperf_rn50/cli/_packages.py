"""What to install where a package is missing that a command needs."""
from mlperf_rn50.errors import UserError

# What is imported, and the package as people call it, by the extra that holds it. No extra holds Horovod: pip alone
# builds it without MXNet.
EXTRAS = {
    'cpu': {'mxnet': 'MXNet', 'nvidia': 'DALI', 'PIL': 'Pillow', 'docstring_parser': 'docstring-parser',
            'imagesize': 'imagesize', 'jsonargparse': 'jsonargparse', 'mlperf_compliance': 'mlperf-compliance',
            'numpy': 'NumPy', 'psutil': 'psutil', 'pynvml': 'nvidia-ml-py', 'tensorboardX': 'tensorboardX',
            'tqdm': 'tqdm'},
    'check': {'mlperf_logging': 'mlperf-logging'},
    'demo': {'sklearn': 'scikit-learn'},
    'export': {'onnx': 'ONNX', 'onnxruntime': 'ONNX Runtime'},
    '': {'horovod': 'Horovod'}}


def explain_missing(error: ModuleNotFoundError) -> UserError | None:
    """The mistake behind a module that is not there; None where it is ours or unknown, which is a bug."""
    module = (error.name or '').partition('.')[0]
    for extra, packages in EXTRAS.items():
        if module in packages:
            pip = f", or pip install 'mlperf-rn50[{extra}]'" if extra else ''
            return UserError(f'{packages[module]} is not installed; install it with launch/setup.sh in the '
                             f'checkout{pip}')
    return None
