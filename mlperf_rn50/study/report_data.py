"""The report as values for programs: JSON with everything, CSV with a row per system for a spreadsheet."""
import csv
import io
import json
from collections.abc import Sequence
from typing import Any

import mlperf_rn50
from mlperf_rn50.mlperf.events import printable
from mlperf_rn50.mlperf.run import Run
from mlperf_rn50.study import rcp
from mlperf_rn50.study.convergence import System, render_warning
from mlperf_rn50.study.scaling import Comparison, Study


def _run_object(run: Run) -> dict[str, Any]:
    return {'file': str(run.path), 'status': run.status, 'epochs_to_converge': run.epochs_to_converge,
            'time_to_train_s': run.time_to_train_s, 'final_accuracy': run.final_accuracy, 'seed': run.seed,
            'last_epoch': run.last_epoch, 'age_s': run.age_s,
            'warnings': [render_warning(run, w) for w in run.warnings],
            'evaluations': [{'epoch': e.epoch, 'accuracy': e.accuracy, 'time_s': e.time_s, 'line': e.line}
                            for e in run.evaluations],
            'lines': dict(run.lines),
            'sources': {name: f'{s.basis}: {s.text}' + (f', line {s.line}' if s.line is not None else '')
                        for name, s in run.sources.items()}}


def system_object(study: Study, system: System, comparison: Comparison | None) -> dict[str, Any]:
    """A system as the JSON report has it; times in seconds unless the name says otherwise."""
    c = comparison
    parts = system.parts
    verdict = rcp.check_rcp(system) if rcp.is_applicable(system) else None
    return {
        'round': system.round, 'benchmark': system.runs[0].benchmark, 'org': system.org, 'system': system.name,
        'study': study.name, 'platform': system.platform,
        'num_nodes': system.num_nodes, 'num_accelerators': system.num_accelerators,
        'accelerator': system.accelerator, 'framework': system.framework,
        'num_ranks': next((r.num_ranks for r in system.runs if r.num_ranks), None),
        'global_batch_size': system.global_batch_size, 'target_accuracy': system.target_accuracy,
        'optimizer': next((dict(r.optimizer) for r in system.runs if r.optimizer), {}),
        'dataset': system.dataset, 'is_imagenet': system.is_imagenet,
        'num_runs': len(system.runs), 'num_converged': len(system.converged),
        'runs': [_run_object(r) for r in system.runs],
        'epochs_to_converge_mean': system.epochs_mean, 'score_minutes': system.score_minutes,
        'time_to_train_mean_s': system.time_s, 'time_to_train_spread_s': system.spread_s,
        'images_per_s': system.images_per_s, 'seconds_per_epoch': system.epoch_s,
        'time_parts_s': {'init': parts.init_s, 'first_epoch': parts.first_s, 'later_epochs': parts.training_s,
                         'evaluation': parts.evaluation_s, 'other': parts.other_s} if parts else None,
        'baseline': study.baseline.name, 'speedup': c.speedup if c else None, 'efficiency': c.efficiency if c else None,
        'throughput_gain': c.throughput_gain if c else None, 'epoch_ratio': c.epoch_ratio if c else None,
        'share_ratio': c.share_ratio if c else None,
        'rcp': {'ruleset': verdict.ruleset, 'reference_epochs': verdict.reference_epochs,
                'min_epochs': verdict.min_epochs, 'passed': verdict.passed, 'text': verdict.text} if verdict else None,
        'warnings': [*system.warnings, *(n for n in study.notes if n.startswith(f'{system.name}: '))]}


def report_object(studies: Sequence[Study]) -> dict[str, Any]:
    """The JSON report; docs/results.md says what its keys mean."""
    return {'format': 'mlperf-rn50 report 1', 'version': mlperf_rn50.__version__,
            'systems': [system_object(study, s, c) for study in studies
                        for s, c in zip(study.systems, study.comparisons)]}


def render_json(studies: Sequence[Study]) -> str:
    """report_object as text."""
    return json.dumps(report_object(studies), indent=1, allow_nan=False)


def _spreadsheet(value: Any) -> Any:
    """A value for CSV; text that a spreadsheet would run as a formula is quoted."""
    if not isinstance(value, str):
        return '' if value is None else value
    return f"'{printable(value)}" if value[:1] in ('=', '+', '-', '@') else printable(value)


def render_csv(studies: Sequence[Study]) -> str:
    """One row per system: the plain values of its JSON object, and of its runs one after another."""
    rows = []
    for system in report_object(studies)['systems']:
        row = {k: v for k, v in system.items() if not isinstance(v, (list, dict)) and k not in ('time_parts_s', 'rcp')}
        for name in ('status', 'epochs_to_converge', 'time_to_train_s'):
            row[f'runs_{name}'] = ' '.join(str(r[name]) for r in system['runs'])
        row['warnings'] = '; '.join(system['warnings'])
        rows.append({k: _spreadsheet(v) for k, v in row.items()})
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip('\n')
