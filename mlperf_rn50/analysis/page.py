"""Pages of HTML that need nothing but themselves: their templates, and the style they share, lie beside this module."""
from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template

from mlperf_rn50.mllog.events import printable


def _source(name: str) -> str:
    return resources.files('mlperf_rn50.analysis').joinpath(name).read_text()


def page_template(name: str) -> Template:
    """The template of a page: what is put into it is escaped, and steers nothing."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                              finalize=lambda v: printable(v) if type(v) is str else v, loader=FunctionLoader(_source))
    return environment.get_template(name)
