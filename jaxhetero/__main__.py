"""``python -m jaxhetero``: the ``jaxhetero`` command where the installed script is not on the path."""

import sys

from jaxhetero.cli import main

if __name__ == "__main__":
    sys.exit(main())
