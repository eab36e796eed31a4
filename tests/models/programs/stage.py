"""A worker that stages SOURCE in FOLDER and tells where it found what: SOURCE FOLDER [workers on a host].

The file system `gated://` reads local files, and waits at each for the file `go` in the current folder. It leaves its
process's number in `reader.pid`.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from rich.console import Console

import jaxhetero
from models.common.command import run_command
from models.common.staging import staged


class Gated(LocalFileSystem):
    protocol = "gated"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("gated://"))

    def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
        part = Path(f"reader.{threading.get_ident()}")  # several threads read at once
        part.write_text(str(os.getpid()))
        part.rename("reader.pid")
        while not Path("go").exists():
            time.sleep(0.01)
        return super()._open(path, *arguments, **options)


def run(arguments: list[str]) -> int:
    source, folder, *more = arguments
    jaxhetero.initialize()
    # Hosts of one machine have folders of their own.
    host = jaxhetero.rank() // int(more[0]) if more else 0
    with staged(source, Path(f"{folder}-{host}"), ("train",), Console()) as found:
        assert found is not None
        for path in sorted(found.rglob("*")):
            if path.is_file():
                print(f"{path} {path.stat().st_ino} {path.stat().st_size}", flush=True)
        jaxhetero.barrier()
    jaxhetero.shutdown()
    return 0


fsspec.register_implementation("gated", Gated)
sys.exit(run_command(run))
