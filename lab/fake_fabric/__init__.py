"""A stand-in for libfabric, as a library: ``JAXHETERO_FABRIC=fake``, with its folder in ``LD_LIBRARY_PATH``."""

from __future__ import annotations

from pathlib import Path

from bench.engines.build_native import build as build_library

_FOLDER = Path(__file__).parent


def build(folder: Path) -> Path:
    """Compile it into ``folder``, under the name of libfabric; takes seconds. The compiler is ``$CXX``, or g++."""
    root = str(_FOLDER.parents[1])
    flags = ["-I", root, "-Wl,-soname,libfabric.so.1", f"-Wl,--version-script,{_FOLDER / 'symbols.lds'}"]
    return build_library(_FOLDER / "fake_fabric.cc", folder, more=flags).rename(folder / "libfabric.so.1")
