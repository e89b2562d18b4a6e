"""MLLOG keys and values that readers of logs need, under their names in
mlperf_logging.mllog.constants.

They are copies, so that reports do not need mlperf-logging, pandas or SciPy. A test compares them
with originals.
"""

BLOCK_START = 'block_start'
BLOCK_STOP = 'block_stop'
CACHE_CLEAR = 'cache_clear'
CLOSED = 'closed'
EPOCH_START = 'epoch_start'
EPOCH_STOP = 'epoch_stop'
EVAL_ACCURACY = 'eval_accuracy'
EVAL_SAMPLES = 'eval_samples'
EVAL_START = 'eval_start'
EVAL_STOP = 'eval_stop'
GLOBAL_BATCH_SIZE = 'global_batch_size'
INIT_START = 'init_start'
INIT_STOP = 'init_stop'
OPEN = 'open'
OPT_BASE_LR = 'opt_base_learning_rate'
OPT_NAME = 'opt_name'
RESNET = 'resnet'
RUN_START = 'run_start'
RUN_STOP = 'run_stop'
SEED = 'seed'
SUBMISSION_BENCHMARK = 'submission_benchmark'
SUBMISSION_DIVISION = 'submission_division'
SUBMISSION_ENTRY = 'submission_entry'
SUBMISSION_ORG = 'submission_org'
SUBMISSION_PLATFORM = 'submission_platform'
SUBMISSION_POC_NAME = 'submission_poc_name'
SUBMISSION_STATUS = 'submission_status'
SUCCESS = 'success'
TRAIN_SAMPLES = 'train_samples'
