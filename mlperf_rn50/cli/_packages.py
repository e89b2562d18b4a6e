"""What to install where a package is missing that a command needs."""
from mlperf_rn50.errors import UserError

# What is imported: the package as people call it, and the extra that holds it. No extra holds Horovod: pip alone
# builds it without MXNet.
PACKAGES = {
    'mxnet': ('MXNet', 'cpu'), 'nvidia': ('DALI', 'train'), 'horovod': ('Horovod', ''),
    'imagesize': ('imagesize', 'train'), 'PIL': ('Pillow', 'train'), 'psutil': ('psutil', 'train'),
    'pynvml': ('nvidia-ml-py', 'train'), 'tensorboardX': ('tensorboardX', 'train'), 'sklearn': ('scikit-learn', 'demo'),
    'onnx': ('ONNX', 'export'), 'onnxruntime': ('ONNX Runtime', 'export')}


def explain_missing(error: ModuleNotFoundError) -> UserError | None:
    """The mistake behind a module that is not there; None where it is ours or unknown, which is a bug."""
    name, extra = PACKAGES.get((error.name or '').partition('.')[0], ('', ''))
    if not name:
        return None
    pip = f", or pip install 'mlperf-rn50[{extra}]'" if extra else ''
    return UserError(f'{name} is not installed; install it with launch/setup.sh in the checkout{pip}')
