"""How the site is built: ``python -m tools.docs_site`` (warnings are errors)."""

from __future__ import annotations

from typing import Any

from docutils import nodes

from jupyter_detllm import __version__

project = "jupyter-detllm"
author = "The jupyter-detllm developers"
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
default_role = "code"  # single backticks in docstrings are code

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

nb_execution_mode = "off"
# Outputs are shown as text, never as markup.
nb_mime_priority_overrides = [("html", "text/plain", 0)]
nb_merge_streams = True

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 80

smartquotes = False  # two dashes stay two dashes
html_theme = "furo"
html_title = f"jupyter-detllm {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
highlight_language = "text"


def _ipython(app: Any, doctree: nodes.document) -> None:
    """Read the cells of notebooks as IPython: magics are no Python."""
    if app.env.docname.startswith("examples/"):
        for block in doctree.findall(nodes.literal_block):
            if block.get("language") == "python":
                block["language"] = "ipython"


def _dashes(_app: Any, doctree: nodes.document) -> None:
    """Set the dash that Napoleon writes between a parameter and its meaning."""
    for text in list(doctree.findall(nodes.Text)):
        if " -- " in text and not isinstance(text.parent, nodes.literal | nodes.literal_block):
            text.parent.replace(text, nodes.Text(text.replace(" -- ", " – ")))  # noqa: RUF001


def setup(app: Any) -> None:
    """Register what the pages need beyond the extensions."""
    app.connect("doctree-read", _dashes)
    app.connect("doctree-read", _ipython)
