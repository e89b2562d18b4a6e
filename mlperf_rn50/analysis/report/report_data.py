"""Machine-readable report: complete JSON, or CSV with a row per run, system or evaluation."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import mlperf_rn50
from mlperf_rn50.analysis.report.tables import findings_of
from mlperf_rn50.analysis.sets import rcp
from mlperf_rn50.analysis.sets.run_set import RunSet, generation_of, kwh
from mlperf_rn50.analysis.sets.scaling import Comparison, Study
from mlperf_rn50.analysis.show.data import render_csv
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.elapsed import render_parts
from mlperf_rn50.mllog.findings import Finding
from mlperf_rn50.mllog.goodput import read_goodput, render_goodput
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.rulesets import ROUND_OF

FORMAT = 'mlperf-rn50 report 1'
# Keys whose value is an object or null.
_TABLES = (
    'time_parts_s',
    'elapsed_parts_s',
    'goodput_parts_s',
    'rcp',
    'energy_not_measured',
    'energy_of_nodes',
)
# Attributes of RunSet that are also keys of the JSON report.
_FACTS = (
    'platform',
    'division',
    'num_nodes',
    'num_accelerators',
    'accelerator',
    'framework',
    'num_ranks',
    'global_batch_size',
    'target_accuracy',
)
_RUN_FACTS = (
    'status',
    'epochs_to_converge',
    'time_to_train_s',
    'final_accuracy',
    'seed',
    'last_epoch',
    'age_s',
    'num_resumes',
)
_RCP = ('ruleset', 'reference_epochs', 'min_epochs', 'passed', 'text')
_EVALUATION = ('epoch', 'accuracy', 'time_s', 'line')
# attributes of Comparison
_FACTORS = ('speedup', 'efficiency', 'throughput_gain', 'epoch_ratio', 'share_ratio')
_EVALUATION_FACTS = (
    'round',
    'org',
    'num_nodes',
    'num_accelerators',
    'global_batch_size',
    'target_accuracy',
)


def _values(source: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return attributes of an object, None for those of None."""
    return {name: getattr(source, name, None) for name in names}


def _finding_object(finding: Finding) -> dict[str, Any]:
    return {
        'grade': finding.grade,
        'text': finding.text,
        'file': finding.file and str(finding.file),
        'line': finding.line,
    }


def _run_object(run_set: RunSet, run: Run) -> dict[str, Any]:
    energy = run_set.energies.get(run.path)
    return {
        'file': str(run.path),
        **_values(run, _RUN_FACTS),
        'elapsed_parts_s': render_parts(run.elapsed) or None,
        **render_goodput(read_goodput(run)),
        'findings': list(map(_finding_object, run.findings)),
        'evaluations': [_values(e, _EVALUATION) for e in run.evaluations],
        'energy_s': energy.seconds if energy and energy.measured else None,
        **_values(energy, ('cpu_joules', 'gpu_joules')),
        'energy_of_nodes': energy.nodes if energy and energy.measured else None,
        'energy_not_measured': dict(energy.reasons) if energy else None,
        'lines': dict(run.lines),
        'sources': {
            name: f'{s.basis}: {s.text}' + (f', line {s.line}' if s.line is not None else '')
            for name, s in run.sources.items()
        },
    }


def _system_object(study: Study, run_set: RunSet, comparison: Comparison | None) -> dict[str, Any]:
    """Return a system's object in the JSON report, without its runs."""
    parts, energy, verdict = run_set.parts, run_set.energy, rcp.check_rcp(run_set)
    return {
        'round': run_set.round,
        'rounds': run_set.rounds,
        'folders': list(map(str, run_set.folders)),
        'benchmark': keys.RESNET,
        'org': run_set.org,
        'system': run_set.name,
        'study': study.name,
        **_values(run_set, _FACTS),
        'generation': generation_of(run_set.accelerator) or None,
        'optimizer': next(
            (
                dict(r.optimizer)
                for r in (*run_set.converged, *run_set.runs)
                if r.optimizer and not run_set.refusal
            ),
            {},
        ),
        'dataset': run_set.dataset,
        'is_imagenet': run_set.is_imagenet,
        'num_runs': len(run_set.runs),
        'num_converged': len(run_set.converged),
        'num_resumed': len(run_set.resumed),
        'refusal': run_set.refusal,
        'violations': run_set.reasons,
        'obstacles': run_set.judgement.obstacles,
        'judged_round': ROUND_OF.get(run_set.judgement.ruleset or ''),
        'epochs_to_converge_mean': run_set.epochs_mean,
        'score_minutes': run_set.score_minutes,
        'official_score_minutes': rcp.official_score_minutes(run_set),
        'time_to_train_mean_s': run_set.time_s,
        'time_to_train_spread_s': run_set.spread_s,
        'images_per_s': run_set.images_per_s,
        'seconds_per_epoch': run_set.epoch_s,
        'time_parts_s': parts
        and {
            'init': parts.init_s,
            'first_epoch': parts.first_s,
            'later_epochs': parts.training_s,
            'evaluation': parts.evaluation_s,
            'other': parts.other_s,
        },
        'node_hours': run_set.node_hours,
        'price_per_node_hour': study.price_per_node_hour,
        'cost': study.cost(run_set),
        'cpu_kwh': kwh(energy.cpu_joules) if energy else None,
        'gpu_kwh': kwh(energy.gpu_joules) if energy else None,
        'images_per_joule': run_set.images_per_joule,
        'energy_not_measured': dict(energy.reasons) if energy else None,
        'baseline': comparison.baseline.name if comparison else None,
        **_values(comparison, _FACTORS),
        'rcp': verdict and _values(verdict, _RCP),
        'findings': list(map(_finding_object, findings_of(study, run_set))),
    }


def _systems(studies: Sequence[Study]) -> Iterator[tuple[RunSet, dict[str, Any]]]:
    for study in studies:
        for run_set, comparison in zip(study.run_sets, study.comparisons):
            yield run_set, _system_object(study, run_set, comparison)


def report_data(studies: Sequence[Study]) -> dict[str, Any]:
    """Return the object of the JSON report, whose keys are described in docs/output.md."""
    return {
        'format': FORMAT,
        'version': mlperf_rn50.__version__,
        'systems': (
            {**entry, 'runs': (_run_object(run_set, run) for run in run_set.runs)}
            for run_set, entry in _systems(studies)
        ),
    }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that fit in a cell, without lists and objects."""
    return {
        name: value
        for name, value in values.items()
        if not isinstance(value, (list, tuple, dict)) and name not in _TABLES
    }


def _render_objects(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    return render_csv(list(dict.fromkeys(name for row in rows for name in row)), rows)


def runs_csv(studies: Sequence[Study]) -> Iterator[str]:
    """Yield CSV with a row per run: the plain values of its system, then those of the run."""
    return _render_objects(
        [
            {
                **_plain(entry),
                **_plain(_run_object(run_set, run)),
                'num_evaluations': len(run.evaluations),
                'num_warnings': run.num_warnings,
            }
            for run_set, entry in _systems(studies)
            for run in run_set.runs
        ]
    )


def systems_csv(studies: Sequence[Study]) -> Iterator[str]:
    """Yield CSV with a row per system."""
    return _render_objects([_plain(entry) for _, entry in _systems(studies)])


def evaluations_csv(studies: Sequence[Study]) -> Iterator[str]:
    """Yield CSV with a row per evaluation: values of its system and run, then those of the
    evaluation."""
    head = ('study', 'system', *_EVALUATION_FACTS, 'file', 'status', 'seed', *_EVALUATION)
    rows = (
        {
            'study': study.name,
            'system': run_set.name,
            **_values(run_set, _EVALUATION_FACTS),
            'file': str(run.path),
            'status': run.status,
            'seed': run.seed,
            **_values(evaluation, _EVALUATION),
        }
        for study in studies
        for run_set in study.run_sets
        for run in run_set.runs
        for evaluation in run.evaluations
    )
    return render_csv(head, rows)
