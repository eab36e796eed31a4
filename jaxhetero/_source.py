"""How messages and ops name a place in the user's program."""

from __future__ import annotations

import re
from pathlib import Path

# What a notebook or a shell gives as the file of an input: ``<ipython-input-3-1a2b>`` of IPython, ``<python-input-3>``
# of Python 3.13, ``/tmp/ipython-input-3-1a2b.py`` of Colab, ``/tmp/ipykernel_17/1234.py`` of Jupyter.
_INPUT = re.compile(r"<?i?python-input-\d|.*/ipython-input-\d|.*/ipykernel_\d+/")


def source_name(file_name: str, function_name: str) -> str:
    """``train.py:train_step``; ``<input>:train_step`` in a notebook.

    An input of a notebook is named without its number and its hash: they differ where one worker has run an input more
    or less than the others.
    """
    return f"{'<input>' if _INPUT.match(file_name) else Path(file_name).name}:{function_name}"
