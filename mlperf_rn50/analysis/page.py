"""Load the Jinja templates of the self-contained HTML pages. All of them include the style sheet
page.css."""

from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template

from mlperf_rn50.text import printable


def page_template(name: str) -> Template:
    """Return a page's template, which escapes inserted values and replaces their control characters
    by '?'."""
    loader = FunctionLoader(lambda path: resources.files(__package__).joinpath(path).read_text())
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda v: printable(v) if type(v) is str else v,
        loader=loader,
    )
    return environment.get_template(name)
