"""Every form of the report, and its pictures, in one folder to hand on."""
from collections.abc import Sequence
from pathlib import Path

from mlperf_rn50.errors import UserError
from mlperf_rn50.files import write_atomically
from mlperf_rn50.study.report_data import render_csv, render_evaluations_csv, render_json
from mlperf_rn50.study.report_page import render_html
from mlperf_rn50.study.report_picture import Picture, dump_picture
from mlperf_rn50.study.report_plots import draw_study
from mlperf_rn50.study.report_text import render_markdown
from mlperf_rn50.study.scaling import Study


def _dump_pictures(study: Study, folder: Path, prefix: str) -> list[Picture]:
    """Draws the pictures of a study and writes them."""
    pictures = draw_study(study)
    for picture in pictures:
        dump_picture(picture, folder, prefix)
    return pictures


def dump_report(studies: Sequence[Study], folder: Path) -> Path:
    """Writes the report in every form, and the pictures; returns the page.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / 'report.json', render_json(studies) + '\n')
        write_atomically(folder / 'report.csv', render_csv(studies) + '\n')
        write_atomically(folder / 'report_evaluations.csv', render_evaluations_csv(studies) + '\n')
        write_atomically(folder / 'report.md', render_markdown(studies) + '\n')
        drawn = [_dump_pictures(study, folder, f'study{i}_' if len(studies) > 1 else '')
                 for i, study in enumerate(studies, start=1)]
        write_atomically(folder / 'report.html', render_html(studies, drawn, folder) + '\n')
    except OSError as e:
        raise UserError(f'--out: {folder}: {e.strerror}; choose a folder that can be written') from e
    return folder / 'report.html'
