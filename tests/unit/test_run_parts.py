"""Parts of the GPU tests with stand-ins: limits, Ctrl-C, the archive and its summary."""

import json
import os
import signal
import subprocess
import sys
import tarfile
from contextlib import suppress

import pytest
from gpu import run_parts
from gpu.run_parts import Part, expected_line, make_parts, run_all, run_part, summarize
from helpers import HANG_LIMIT_S, ROOT, json_table, own_signals, wait_for

ROWS = {'tables': [{'rows': [{'images_per_s': 2000.0}]}]}


def python(name, text, **keys):
    return Part(name, [sys.executable, '-c', text], **keys)


def contents(folder):
    """Return the files of the only archive in a folder, by name without its top folder, and the
    results."""
    [archive] = folder.glob('gpu_*')
    with tarfile.open(archive) as tar:
        files = {
            m.name.partition('/')[2]: tar.extractfile(m).read().decode()
            for m in tar.getmembers()
            if m.isfile()
        }
    return files, [json.loads(line) for line in files['results.jsonl'].splitlines()]


@pytest.mark.parametrize(
    'text, limit_s, left_s, expected',
    json_table(r"""
"" | 600 | 600 | ["passed", ""]
"raise SystemExit('bad\\nlast line')" | 600 | 600 | ["failed", "last line"]
"raise SystemExit('cuda: out of memory')" | 600 | 600 | ["out of memory", "cuda: out of memory"]
"import time; time.sleep(600)" | 0.1 | 600 | ["failed", "limit of 0.1 s"]
"import time; time.sleep(600)" | 600 | 0.1 | ["cut", ""]
"""),
)
def test_status_of_a_part(text, limit_s, left_s, expected, tmp_path):
    result = run_part(python('a part', text, limit_s=limit_s), tmp_path, left_s)
    assert [result['status'], result['reason']] == expected


def test_result_of_a_part_has_the_ratio_to_pytorch(tmp_path):
    line = 'training step, batch 208, float16, images/s: ratio 0.931'
    assert run_part(python('a part', f'print({line!r})'), tmp_path, 600)['ratio'] == '0.931'


def test_summary_has_ratio_decoding_and_reasons_for_parts_left_out():
    passed, out = {'status': 'passed', 'reason': ''}, {'status': 'left out', 'reason': 'no MPS'}
    results = [
        {'part': 'PyTorch, 208', **passed, 'ratio': '0.931'},
        {'part': 'PyTorch, 64', **passed, 'ratio': '0.870'},
        {'part': 'hw_decoder_load 0.65, 204', **passed, 'rows': [{'images_per_s': 8000.4}]},
        {'part': 'exchange', **out},
        {'part': 'a kill', **out},
        {'part': 'steps', 'status': 'cut', 'reason': ''},
    ]
    lines = summarize('title', 'card', [], results)
    assert 'ratio of images/s to the faster PyTorch: 0.931 with 208, 0.870 with 64' in lines
    assert 'images/s of decoding: 8,000 with hw_decoder_load 0.65' in lines
    assert lines[-1] == 'not complete: no MPS: exchange, a kill; cut: steps'


def test_reason_of_a_failed_doctor_is_what_it_found(tmp_path):
    checks = [{'status': 'ok', 'found': 'a'}, {'status': 'failed', 'found': 'no code for sm_90'}]
    text = json.dumps({'checks': checks}, indent=1)
    result = run_part(python('doctor', f'print({text!r}); raise SystemExit(1)'), tmp_path, 600)
    assert result['reason'] == 'no code for sm_90'


def test_parts_between_gpus_precede_those_on_one(tmp_path):
    one, two = ([p.name for p in make_parts(True, n, tmp_path)] for n in (1, 2))
    assert two.index('all-reduce, 204') < two.index('ranks of a GPU') and 'exchange' in one
    needs = {p.name: p.needs for p in make_parts(True, 2, tmp_path)}
    assert all('Horovod' in needs[name] for name in ('digits', 'CIFAR-10'))


@pytest.mark.parametrize('has_nccl', [True, False])
def test_ranks_need_horovod_with_nccl(has_nccl, monkeypatch):
    build = f'[X] MXNet\n[X] MPI\n[{"X" if has_nccl else " "}] NCCL'
    monkeypatch.setattr(run_parts, 'output_of', lambda *words, **keys: build)
    missing = run_parts.find_missing(has_torch=True)
    assert ('Horovod' not in missing) == has_nccl and 'PyTorch' not in missing
    assert 'PyTorch' in run_parts.find_missing(has_torch=False)


def test_archive_has_results_of_parts_without_mxnet_if_it_cannot_use_the_card(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv('SECRET_TOKEN', 'hidden')
    monkeypatch.setenv('MXNET_SHOWN', '1')
    parts = [
        python('synthetic, 408', f'print({json.dumps(ROWS)!r})', needs=()),
        python('training', 'raise SystemExit(1)'),
        python('broken', 'raise SystemExit("why")', needs=()),
    ]
    with own_signals():
        assert (
            run_all(parts, 'NVIDIA H100 80GB HBM3', {'kernels': 'no code for it'}, 12, tmp_path)
            == 1
        )
    files, results = contents(tmp_path)
    assert [(r['part'], r['status'], r['reason']) for r in results] == [
        ('synthetic, 408', 'passed', ''),
        ('training', 'left out', 'no code for it'),
        ('broken', 'failed', 'why'),
    ]
    facts = {
        f'{when}/{n}.txt'
        for when in ('start', 'end')
        for n in ('environment', 'kernel', 'nvidia_smi_q', 'nvidia_smi_topo', 'packages')
    }
    assert facts | {'clocks.csv', 'summary.txt', 'broken.stderr.txt', 'synthetic_408.txt'} <= set(
        files
    )
    assert 'MXNET_SHOWN=1' in files['start/environment.txt'] and not any(
        'hidden' in text for text in files.values()
    )
    printed = capsys.readouterr().out
    assert files['summary.txt'] in printed and '2,000 with 408' in printed and 'H100 SXM' in printed


def test_interrupted_run_stops_its_part_and_writes_the_archive(tmp_path):
    sleeping = "Part('second', ['sh', '-c', 'echo $$ > pid; sleep 900'])"
    parts = f"[Part('first', ['true']), {sleeping}, Part('third', ['true'])]"
    program = (
        f"from gpu.run_parts import *; sys.exit(run_all({parts}, 'card', {{}}, 60, "
        f'Path({str(tmp_path)!r})))'
    )
    process = subprocess.Popen([sys.executable, '-c', program], cwd=ROOT / 'tests')
    [pid] = wait_for(
        lambda: [int(t) for p in tmp_path.glob('*/pid') if (t := p.read_text())],
        lambda: process.poll() is None,
        lambda: 'no second part',
    )
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(HANG_LIMIT_S) == 130
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    _, results = contents(tmp_path)
    assert [(r['part'], r['status']) for r in results] == [
        ('first', 'passed'),
        ('second', 'interrupted'),
        ('third', 'not run'),
    ]


@pytest.mark.parametrize(
    'gpu, expected',
    json_table("""
"NVIDIA A100-SXM4-80GB" | "A100 SXM 80GB: bench train should print 2,666 to 4,114 images/s"
"NVIDIA A100-SXM4-40GB" | "A100 SXM 40GB: "
"NVIDIA A100 80GB PCIe" | "A100 PCIe 80GB: "
"NVIDIA A100-PCIE-40GB" | "A100 PCIe 40GB: "
"Tesla V100-SXM2-16GB"  | "V100: "
"NVIDIA H100 80GB HBM3" | "H100 SXM, H100 HBM3: "
"NVIDIA H100 PCIe"      | "H100 PCIe: "
"NVIDIA L40S"           | "L40S: "
"NVIDIA A10"            | "no speed of NVIDIA A10 "
"NVIDIA GB200"          | "no speed of NVIDIA GB200 "
"""),
)
def test_expected_speed_of_a_gpu(gpu, expected):
    assert expected_line(gpu).startswith(expected)


@pytest.mark.parametrize('is_nvidias', [True, False])
def test_summary_has_at_most_20_lines_with_the_line_of_the_archive(is_nvidias, tmp_path):
    """Each compared part has a part to compare with."""
    parts = make_parts(is_nvidias, 2, tmp_path)
    names = {p.name for p in parts}
    assert {p.compared for p in parts} - {''} <= names and len(names) == len(parts)
    failed = {'status': 'failed', 'reason': 'x' * 500, **ROWS['tables'][0]}
    lines = summarize('title', 'card', parts, [{'part': p.name, **failed} for p in parts])
    assert (
        len(lines) <= 19 and max(map(len, lines)) <= 200 and '8 buckets, 51 images: +0.0%' in lines
    )
