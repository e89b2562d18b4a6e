"""Every form of a prediction, and its picture, in one folder to hand on."""
from pathlib import Path

from mlperf_rn50.errors import UserError
from mlperf_rn50.files import write_atomically
from mlperf_rn50.study.predict_answer import Answer
from mlperf_rn50.study.predict_plot import draw_prediction, dump_picture_twice
from mlperf_rn50.study.predict_tables import render_json, render_tables
from mlperf_rn50.study.predict_validation import Validation


def dump_prediction(answer: Answer, validation: Validation, folder: Path) -> Path:
    """Writes prediction.json, prediction.md and, where anything is predicted, the picture; returns the folder.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / 'prediction.json', render_json(answer, validation) + '\n')
        write_atomically(folder / 'prediction.md', render_tables(answer, validation, is_markdown=True) + '\n')
        if picture := draw_prediction(answer):
            dump_picture_twice(picture, folder)
    except OSError as e:
        raise UserError(f'--out: {folder}: {e.strerror}; choose a folder that can be written') from e
    return folder
