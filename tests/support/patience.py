"""How many times longer than usual to wait before a test calls something a hang: sanitizers slow everything down."""

import os

PATIENCE = float(os.environ.get("TESTS_PATIENCE", "1"))
