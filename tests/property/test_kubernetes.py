"""Kubernetes manifests with arbitrary texts."""

import re
from collections.abc import Mapping

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_rn50.launch.kubernetes import Training, Volume, render_mpi_job

# Any program argument, and texts with characters that are special in YAML, a shell or Kubernetes.
TEXTS = st.text(st.characters(exclude_categories=['Cs'], exclude_characters='\0')) | st.text(
    '$(){}[]\'"\\\n\t #&*!|>%@`:-,?~y', max_size=12
)
TRAININGS = st.builds(
    Training,
    name=TEXTS,
    image=TEXTS,
    num_nodes=st.integers(1, 99),
    ranks_per_node=st.integers(1, 9),
    gpus_per_node=st.integers(0, 8),
    volumes=st.lists(st.builds(Volume, TEXTS, TEXTS), min_size=1, max_size=2).map(tuple),
    config_path=TEXTS,
    config_text=st.none() | TEXTS,
    options=st.lists(TEXTS, max_size=4).map(tuple),
    namespace=st.none() | TEXTS,
)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand an argument like Kubernetes: $(NAME) becomes the value of a known variable, and $$
    becomes $."""
    return re.sub(r'\$(?:(\$)|\(([^)]*)\))', lambda m: m[1] or variables.get(m[2], m[0]), text)


@settings(max_examples=40)
@given(TRAININGS)
def test_manifests_preserve_every_text_and_option(training):
    text = render_mpi_job(training)
    quoted = {
        token.value
        for token in yaml.scan(text)
        if isinstance(token, yaml.ScalarToken) and not token.plain
    }
    # never read as a number or boolean
    assert {word.replace('$', '$$') for word in training.options} <= quoted
    manifests = list(yaml.safe_load_all(text))
    assert text.isascii() and {m['metadata']['name'] for m in manifests} == {training.name}
    assert [m['data'] for m in manifests[:-1]] == [
        {'config.yaml': t} for t in [training.config_text] if t is not None
    ]
    [container] = manifests[-1]['spec']['mpiReplicaSpecs']['Launcher']['template']['spec'][
        'containers'
    ]
    words = [expand(w, {'HOME': '/home/rn50'}) for w in container['args']]
    expected = ['--config', training.config_path, *training.options]
    assert words[len(words) - len(expected) :] == expected
    assert [m['mountPath'] for m in container['volumeMounts']][: len(training.volumes)] == [
        v.path for v in training.volumes
    ]
