"""Linux' notation of CPU lists: '0-3,8'."""
from collections.abc import Sequence


def parse_cpu_list(text: str) -> list[int]:
    """The numbers of '0-3,8', Linux' notation."""
    parts = [p.partition('-') for p in text.strip().split(',') if p]
    return [cpu for first, _, last in parts for cpu in range(int(first), int(last or first) + 1)]


def render_cpu_list(cpus: Sequence[int]) -> str:
    """The notation that parse_cpu_list reads."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ','.join(str(a) if a == b else f'{a}-{b}' for a, b in ranges)
