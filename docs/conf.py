"""The site's settings; `.ci/docs` builds it. https://www.sphinx-doc.org/en/master/usage/configuration.html"""

import sys
from pathlib import Path

import jaxhetero

sys.path.insert(0, str(Path(__file__).parent))  # for _extension

project = "jaxhetero"
author = "the jaxhetero authors"
copyright = f"{author}, Apache License 2.0"
version = release = jaxhetero.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "_extension",
]
exclude_patterns = ["_static"]

# Markdown: links to headings work in a rendered page as they do in a repository.
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
smartquotes = False  # "--workers" stays as it must be typed

# A block that does not name its language is a command or an output.
highlight_language = "text"
# The prompt of an example is not copied.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# Docstrings: Google style; a word in single backquotes is code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autosummary_generate = False
autodoc_mock_imports = ["ray"]  # an extra of 240 MB
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "sphinx_book_theme"
html_title = f"jaxhetero {version}"
html_static_path = ["_static"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "footer_content_items": ["copyright"],
    "navbar_persistent": [],  # the sidebar has the search field already
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}
