"""Write docs/configuration.md from the dataclasses that mlperf_rn50/config.py combines. A test
compares the two.

Usage: python docs/make_reference.py > docs/configuration.md
"""

import dataclasses
import html
import re
from typing import Any

from mlperf_rn50.config import SECTIONS, render_value
from mlperf_rn50.config_text import meanings_of, summary_of, takes_text

_HEAD = """# Configuration

Values come from the defaults below, then from the file given with `--config`, then from options
named like the keys (`--schedule.base_lr 0.4`). A file contains only differences from the defaults:

```yaml
schedule: {base_lr: 0.4, warmup_epochs: 2}
train: {global_batch_size: 256}
```

`mlperf-rn50 train --config FILE --print-config` prints all values, and `mlperf-rn50 train --help
schedule` the keys of a group. Files are plain YAML without tags, aliases and merge keys. Numbers
are decimal, such as 64, 0.4 or 1e-3. Paths may begin with `~`; variables such as `$HOME` are
refused in them.

Each line has a key with its default, its unit and bounds in brackets, and its meaning. Keys without
brackets are switches (`true` or `false`) or text. Where `null` is the default, it is also a value.
`python docs/make_reference.py` writes this page from the options of `config.py`, `data`, `model`
and `train`."""


def takes(field: dataclasses.Field) -> str:
    """Return unit and bounds of a number, or the valid texts, without what the default shows."""
    text = takes_text(field).replace(' or null', '')
    if text in ('text', 'true or false'):
        return ''
    kind, *bounds = text.split(', ', 1)
    if kind not in ('whole number', 'number'):
        return text
    unit = field.metadata.get('unit', '')
    if unit == 'fraction' and bounds:
        return bounds[0]
    return ', '.join([unit or kind, *bounds])


def default_text(value: Any) -> str:
    """Return a default in YAML syntax, numbers with at most six digits."""
    return (
        f'[{", ".join(map(render_value, value))}]'
        if isinstance(value, tuple)
        else render_value(value)
    )


def render_section(name: str, section: type) -> str:
    """Render heading, subject and a line per key of a section."""
    meanings = meanings_of(section)
    lines = []
    for field in dataclasses.fields(section):
        meaning = html.escape(meanings[field.name].rstrip('.'), quote=False)
        taken = takes(field)
        words = set(re.findall(r'\w+', f'{meaning} {taken}'))
        if words == set(re.findall(r'\w+', meaning)) | {'or'}:  # the meaning names the valid texts
            taken = ''
        taken = f' ({taken})' if taken else ''
        lines.append(f'- `{field.name}: {default_text(field.default)}`{taken}: {meaning}')
    return '\n'.join([f'## {name}', '', summary_of(section), '', *lines])


def render_reference() -> str:
    """Render the whole page."""
    return (
        '\n\n'.join([_HEAD, *(render_section(name, section) for name, section in SECTIONS.items())])
        + '\n'
    )


if __name__ == '__main__':
    print(render_reference(), end='')
