"""Compute epochs to converge, time to train and speed-up from MLPerf logs of any round.

examples:
  mlperf-rn50 report logs/digits_sweep
  mlperf-rn50 report training_results_v0.7/NVIDIA --format json
  mlperf-rn50 report logs/c4140 --format csv --rows evaluations
  mlperf-rn50 report published/v2.0/Dell    (packaged table; also published, published/v2.0)
  mlperf-rn50 report published --org dell --accelerator a100 --round v2.0
  mlperf-rn50 report logs/c4140 --out logs/c4140/report --baseline 2x4 --price-per-node-hour 3.5

Runs that did not converge are always listed. Runs in one folder that differ in target, number of
nodes or data, or, if converged, in batch size or optimizer are not a run set. They are listed with
the reason, and excluded from comparisons. Other sets that mlperf-rn50 check refuses have no MLPerf
score.

exit codes: 0 no run set is refused, 1 a run set is refused, as by check, 2 invalid arguments or no
readable log
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mlperf_rn50.cli.output import add_format_option, print_answer
from mlperf_rn50.cli.parsers import add_price_option, add_wide_option, command_parser, count
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, ConfigError
from mlperf_rn50.mllog.rulesets import parse_round
from mlperf_rn50.parser import Parser, option_adder
from mlperf_rn50.text import printable


def make_parser() -> Parser:
    parser = command_parser('report', __doc__)
    add = option_adder(parser)
    add(
        'paths PATH',
        'log, or folder that contains result_<k>.txt; the logs of one folder are one system',
        nargs='+',
    )
    add_format_option(parser, ['csv', 'html'])
    add(
        '--rows', 'rows of --format csv (default: runs)', choices=['runs', 'systems', 'evaluations']
    )
    add(
        '--out DIR',
        'folder for report.{html,json,md,csv}, report_evaluations.csv, figures (SVG, PNG)',
    )
    add('--title TEXT', 'heading of the page (default: the systems and the target)')
    add('--note TEXT', 'text below the heading of the page')
    add(
        '--findings',
        'list all findings in text and Markdown, also notes (default: at most 3 errors and '
        'warnings per system)',
    )
    add('--round ROUND', 'report only systems of this round, such as v2.0', type=parse_round)
    add('--org TEXT', 'report only systems whose organisation contains this text, in any case')
    add(
        '--accelerator TEXT',
        'report only systems whose accelerator contains this text, in any case',
    )
    add('--batch SIZE', 'report only systems with this global batch size', type=count(10**9))
    add('--nodes N', 'report only systems with this number of nodes', type=count(10**6))
    add('--baseline SYSTEM', 'system to compare with (default: the smallest set of each series)')
    add_price_option(parser)
    add_wide_option(parser)
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    if options.rows and options.format != 'csv':
        raise ConfigError(f'--rows: got --format {options.format}, expected --format csv')
    if (options.title or options.note) and not options.out and options.format != 'html':
        raise ConfigError(
            f'--title, --note: got --format {options.format}, expected --format html or --out'
        )
    from mlperf_rn50.analysis.report.report_data import (
        evaluations_csv,
        report_data,
        runs_csv,
        systems_csv,
    )
    from mlperf_rn50.analysis.report.sections import MAX_STUDIES, make_page, make_report, page_texts
    from mlperf_rn50.analysis.run_data import load_run
    from mlperf_rn50.analysis.sets.load import Rules, describe_others, filter_sets, load_logs
    from mlperf_rn50.analysis.sets.published import sets_under
    from mlperf_rn50.analysis.sets.scaling import make_studies
    from mlperf_rn50.analysis.why.time_answer import bottleneck_sentence
    from mlperf_rn50.answer import Answer
    from mlperf_rn50.runfolder.names import run_of

    found = {path: sets_under(path) for path in map(Path, options.paths)}
    published = dict.fromkeys(s for sets in found.values() for s in sets)
    logs = [path for path, sets in found.items() if not sets]
    loaded, others = load_logs(logs, Rules()) if logs else ([], [])
    if others:
        print(f'mlperf-rn50: {describe_others(others)}', file=sys.stderr)
    run_sets = filter_sets([*loaded, *published], vars(options))
    limit = ''
    if len(run_sets) == 1 and not run_sets[0].is_published:
        runs = run_sets[0].runs
        limit = bottleneck_sentence(load_run(run_of(runs[-1].path)))
        if limit and len(runs) > 1:
            limit = f'{runs[-1].path.name}: {limit}'
    studies = make_studies(run_sets, options.baseline, options.price_per_node_hour)
    texts = page_texts(studies, ' '.join(options.paths), options.note)
    if options.out:
        from mlperf_rn50.analysis.show.page import dump_answer

        path = dump_answer(
            replace(make_report(studies, options.findings), data=report_data(studies)),
            Path(options.out),
            'report',
            page=make_page(studies, limit, options.title),
            files={
                'report.csv': runs_csv(studies),
                'report_evaluations.csv': evaluations_csv(studies),
            },
            has_sources=len(studies) <= MAX_STUDIES,
            **texts,
        )
        print(f'mlperf-rn50: wrote {printable(str(path))}', file=sys.stderr)
    if options.format == 'csv':
        render = {'systems': systems_csv, 'evaluations': evaluations_csv}
        sys.stdout.writelines(render.get(options.rows, runs_csv)(studies))
    elif options.format == 'json':
        print_answer(Answer(data=report_data(studies)), options)
    elif options.format != 'html':
        print_answer(make_report(studies, options.findings), options)
    elif not options.out:
        from mlperf_rn50.analysis.show.page import render_html

        folder = Path.cwd() if len(studies) <= MAX_STUDIES else None
        print(render_html(make_page(studies, limit, options.title), folder=folder, **texts))
    submitted = [s for run_set in run_sets for s in (run_set, *run_set.later)]
    return EXIT_FAILED if any(s.reasons for s in submitted) else EXIT_OK
