"""``python -m bench.simulate``."""

import sys

from bench.simulate.records import main

if __name__ == "__main__":
    sys.exit(main())
