"""Start ranks on this machine, on hosts or in a Slurm job, and train with them.

examples:
  mlperf-rn50 launch mpirun --hosts h1,h2 --config launch/configs/c4140_v100_2node.yaml --restarts 3
  mlperf-rn50 launch ranks 2 mlperf-rn50 bench train --batch-sizes 32

The scripts in launch/ run these commands. For the options of a launcher, run mlperf-rn50 launch
LAUNCHER --help.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlperf_rn50.cli.parsers import command_parser, config_parser
from mlperf_rn50.errors import EXIT_CODES, EXIT_OK, ConfigError, UserError, option_error
from mlperf_rn50.launch import kubernetes
from mlperf_rn50.launch.engines import CHECKOUT, ENGINES, Options, parse_arguments, ranks_parser
from mlperf_rn50.launch.helpers import LAUNCHER_SIGNALS
from mlperf_rn50.parser import Parser
from mlperf_rn50.system.gpu_env import DEVICE_VARIABLE
from mlperf_rn50.system.launcher_env import COMMAND
from mlperf_rn50.system.signals import STOPPING, SignalQueue

if TYPE_CHECKING:
    from mlperf_rn50.config import Config
    from mlperf_rn50.launch.launcher import Launcher
    from mlperf_rn50.launch.placement import Placement


def make_parser() -> Parser:
    parser = command_parser('launch', __doc__)
    launchers = parser.add_subparsers(
        metavar='LAUNCHER',
        required=True,
        parser_class=ArgumentParser,
        help='what starts the ranks, and its options',
    )
    parsers = {name: engine.make_parser(name) for name, engine in ENGINES.items()}
    parsers |= {'kubernetes': kubernetes.make_parser(), 'ranks': ranks_parser()}
    for name, launcher in parsers.items():
        launchers.add_parser(name, help=launcher.description)
        launchers._name_parser_map[name] = launcher
    return parser


def run(argv: Sequence[str]) -> int:
    if not (CHECKOUT / 'launch/engines').is_dir():
        raise ConfigError(f'launch: {CHECKOUT} is no checkout; run launch/setup.sh in one')
    name, words = ''.join(argv[:1]), argv[1:]
    if name == 'ranks':
        return run_ranks(words)
    if name == 'kubernetes':
        return run_kubernetes(words)
    if name not in ENGINES:
        make_parser().parse_args(argv[:1])
    return start_launcher(name, words)


def run_kubernetes(words: Sequence[str]) -> int:
    """Print the manifests for Kubernetes or, with --dry-run, the plan of the training."""
    # This comes first, because it answers --help, which needs no import.
    training, warning = kubernetes.plan_training([w for w in words if w != '--dry-run'])
    num_ranks = training.num_nodes * training.ranks_per_node
    train_words = [*kubernetes.train_words(words), '--ranks', str(num_ranks)]
    if '--dry-run' in words:
        from mlperf_rn50.cli import train

        return train.run(train_words)
    from mlperf_rn50.train.plan import fit_batch, make_plan

    config = load_train_config(train_words)
    if '--elastic' in train_words:  # a run to resume may have any batch
        config = fit_batch(config, num_ranks)
    make_plan(config, num_ranks)  # refuses what the ranks would refuse
    kubernetes.print_manifests(training, warning)
    return EXIT_OK


def load_train_config(argv: Sequence[str]) -> Config:
    """Return the configuration of a command line of train."""
    from mlperf_rn50.cli.train import parse_command

    return parse_command(argv)[1]


def start_launcher(name: str, argv: Sequence[str], signals: SignalQueue | None = None) -> int:
    """Run a launcher with options; return its exit code."""
    engine = ENGINES[name]
    parser = engine.make_parser(name)
    options = parse_arguments(parser, argv)  # before the imports, because --help needs no packages
    from mlperf_rn50.cli import train
    from mlperf_rn50.launch.launcher import Launcher
    from mlperf_rn50.launch.placement import check_machine, place_ranks

    known = config_parser('train', train.add_options)._option_string_actions
    for word in options.train:
        if word.startswith('--') and word.partition('=')[0] not in known:
            raise option_error(f'unrecognized arguments: {word}', parser, known)
    num_requeues = os.environ.get('SLURM_RESTART_COUNT', '0') if engine.in_slurm else '0'
    options = replace(options, is_requeued=num_requeues != '0')
    if isinstance(options.resume, str):
        options = choose_run(options)

    is_placed = not options.only_prints
    if '--dry-run' in options.train:  # a plan is also printed outside a Slurm job, without nodes
        is_placed = not engine.in_slurm or 'SLURM_JOB_NODELIST' in os.environ
    if is_placed:
        engine.program(options)  # report a missing image or folder first
        placement, config = place_ranks(engine, options, load_train_config)
        check_machine(engine, options, placement, config)
        if options.config and options.seeds > 1 and config.run.seed is not None:
            raise ConfigError(
                f'run.seed: got {config.run.seed} with --seeds {options.seeds}, expected null, so '
                'that each run draws its own seed; add --run.seed null'
            )
        options = replace(
            options,
            nodes=len(placement.hosts),
            ranks_per_node=placement.ranks_per_node,
            ranks_per_device=options.ranks_per_device or config.run.ranks_per_device,
        )
    if options.only_prints:
        return train.run(options.as_train)
    # Before this, Ctrl-C ends the program at once.
    signals = signals or SignalQueue(LAUNCHER_SIGNALS, STOPPING)
    return supervise(Launcher(name, engine, options, signals), placement, config)


def choose_run(options: Options) -> Options:
    """Return the options for the run of a path given with --resume; raise UserError if it has no
    such run."""
    from mlperf_rn50.launch.attempts import has_gone_on
    from mlperf_rn50.runfolder.names import RunFolder, folder_index
    from mlperf_rn50.train.checkpoint.resumable import find_run, is_checkpoint

    path = Path(str(options.resume))
    if options.is_requeued and is_checkpoint(path):
        given = RunFolder(path.parent.parent, folder_index(path.parent))
        # An earlier start of this job went on from the checkpoint, so newer ones are its own.
        if not path.exists() or has_gone_on(given, os.environ.get('SLURM_JOB_ID', '')):
            path = given.checkpoints
    run, path = find_run(path)
    is_elsewhere = Path(options.run_dir or run.dir).resolve() != run.dir.resolve()
    if options.config or options.seeds > 1 or is_elsewhere:
        raise ConfigError(
            f'--resume: got {options.resume} with --config, --seeds or another --run-dir, '
            'expected none of these; omit them, because the run has its own folder and '
            'configuration'
        )
    return replace(options, resume=str(path), run_dir=str(run.dir), run=run)


def supervise(launcher: Launcher, placement: Placement, config: Config) -> int:
    """Make the runs of a launcher; return its exit code."""
    from mlperf_rn50.launch.attempts import (
        end_of_job,
        first_run_of,
        patient,
        patient_progress,
    )
    from mlperf_rn50.launch.hosts import ReturnTests, silent_hosts
    from mlperf_rn50.launch.launcher import SIDE_JOB, new_token
    from mlperf_rn50.launch.supervisor import Supervisor
    from mlperf_rn50.runfolder.locks import folder_lock
    from mlperf_rn50.system.mpi_session import mpi_settings

    options, signals, device = launcher.options, launcher.signals, config.train.device
    run_dir, in_slurm = placement.run_dir, launcher.engine.in_slurm
    token = new_token()
    # only a job of launch/slurm.sbatch is requeued
    batch_job = os.environ.get('SLURM_JOB_ID', token) if in_slurm else token
    if options.doctor and mpi_settings(os.environ, CHECKOUT / '.venv'):
        launcher.try_mpi(placement, f'{token}-{SIDE_JOB}', device)
    shares_gpus = device == 'gpu' and (options.ranks_per_device or 1) > 1
    last_code = EXIT_OK  # of the start before

    def start(place: Placement, job: str, *arguments: Any) -> int:
        nonlocal last_code
        if last_code and shares_gpus:  # killed ranks may leave an unusable service
            stop_mps(launcher, place, job + SIDE_JOB, device)
        last_code = launcher.start(config, place, job, *arguments)
        return last_code

    with folder_lock(run_dir):
        before = patient_progress(run_dir, options.run)
        first_run = 0
        if in_slurm:
            first_run = patient(first_run_of)(
                run_dir,
                batch_job,
                is_resume=bool(options.resume),
                is_requeued=options.is_requeued,
                chosen=options.run,
            )
        is_own_run = options.is_requeued and not options.resume and options.seeds == 1
        if is_own_run and (end := patient(end_of_job)(run_dir, first_run)):
            launcher.say(f'the run of this job has {end}')
            return EXIT_CODES[end]
        if options.is_requeued:  # the job resumes its run
            options = replace(options, resume=options.resume or True)
        supervisor = Supervisor(
            start=start,
            silent=lambda names: silent_hosts(names if options.hosts else (), signals),
            returned=ReturnTests().returned,
            say=launcher.say,
            signals=signals,
            options=options,
            placement=placement,
            batch_job=batch_job,
            token=token,
            first_run=first_run,
        )
        try:
            code = supervisor.run_all()
        finally:
            if shares_gpus:
                stop_mps(launcher, supervisor.placement, f'{token}-{SIDE_JOB}', device)
        has_begun = in_slurm and patient_progress(run_dir, options.run) != before
    return launcher.requeue(code, run_dir, has_begun) if in_slurm else code


def stop_mps(launcher: Launcher, placement: Placement, job: str, device: str) -> None:
    """Stop NVIDIA's Multi-Process Service on all hosts; report a failure, which must not replace an
    error of the run."""
    from mlperf_rn50.launch.launcher import GRACE_S

    # without earlier stop requests; it leaves the handlers of the signals as they are
    with closing(SignalQueue(())) as own:
        try:
            replace(launcher, signals=own).start_ranks(
                replace(placement, ranks_per_node=1),
                job,
                [str(CHECKOUT / 'launch/mps.sh'), 'stop'],
                device,
                limit_s=GRACE_S,
            )
        except UserError as e:
            launcher.say(f'MPS was not stopped: {e}')


def run_ranks(argv: Sequence[str]) -> int:
    """Run a program with a number of ranks on this machine or each host."""
    # unlike Parser, leaves $ and ~ to the program
    parser = ranks_parser()
    o, unknown = ArgumentParser.parse_known_args(parser, argv)
    if unknown:
        raise option_error(f'unrecognized arguments: {unknown[0]}', parser)
    from mlperf_rn50.launch.launcher import Launcher

    engine = ENGINES['local']
    per_device = os.environ.get('MLPERF_RN50_RANKS_PER_DEVICE') or '1'
    options = parse_arguments(engine.make_parser('local'), ['--ranks-per-device', per_device])
    options = replace(options, hosts=o.hosts, command=os.environ.get(COMMAND, ''))
    signals = SignalQueue(LAUNCHER_SIGNALS, STOPPING if o.words[:1] == ['train'] else '')
    device = os.environ.get(DEVICE_VARIABLE, '')  # unknown: ranks stay near the GPUs, if any
    program = [o.program, *o.words]
    return Launcher('ranks', engine, options, signals).run_program(
        o.ranks_per_node, program, device
    )
