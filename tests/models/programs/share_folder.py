"""Enters a host's folder, says what it found there, and leaves at the end of standard input: FOLDER JOB CONTENT.

With CONTENT `wait` it never finishes filling.
"""

import os
import sys
import time
from pathlib import Path

from models.common.errors import SettingsError
from models.common.host_folder import HostFolder

folder, job, content = sys.argv[1:]


def fill(target: Path) -> None:
    (target / "half").write_text(str(os.getpid()))
    print("filling", flush=True)
    while content == "wait":
        time.sleep(0.01)
    (target / "half").write_text(content)
    (target / "half").rename(target / "whole")


shared = HostFolder(Path(folder), job)
try:
    found = shared.enter(fill, lambda: False)
    assert found is not None
    print((found / "whole").read_text(), flush=True)
    sys.stdin.read()
except SettingsError as error:
    print(error, flush=True)
finally:
    shared.leave()
