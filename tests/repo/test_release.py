"""What a release is made of: the version in every place, and what the sdist and the wheel contain."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
SDIST = f"jaxhetero-{VERSION}.tar.gz"
# One wheel serves Python 3.12 and all later ones.
TAG = "cp312-abi3" if sys.version_info >= (3, 12) else "cp311-cp311"


def package_files() -> set[str]:
    """The files of the package that every wheel must have, as in the checkout."""
    kinds = {".py", ".pyi", ".toml", ".typed"}
    return {str(path.relative_to(ROOT)) for path in (ROOT / "jaxhetero").rglob("*") if path.suffix in kinds}


def stray_files(names: set[str]) -> set[str]:
    """Those of a wheel's files that neither belong to the package nor describe the distribution."""
    return {name for name in names if not name.startswith(("jaxhetero/", f"jaxhetero-{VERSION}.dist-info/"))}


def test_the_version_is_the_same_everywhere() -> None:
    from jaxhetero import __version__

    assert __version__ == VERSION
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\d+\.\d+\.\d+) ", changes, re.MULTILINE)[0] == VERSION
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_installed_wheel_has_the_package_and_nothing_else() -> None:
    distribution = importlib.metadata.distribution("jaxhetero")
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        pytest.skip("installed in editable mode")
    files = {str(path) for path in distribution.files or ()}
    installed = {name for name in files if not name.endswith(".pyc") and not name.startswith("../")}
    assert package_files() <= installed
    assert any(re.fullmatch(r"jaxhetero/_native\..*\.so", name) for name in installed)
    assert not stray_files(installed)
    assert f"Tag: {TAG}-" in (distribution.read_text("WHEEL") or "")


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """The folder with the sdist and a wheel built from it: no compiler cache, no build folder, nothing of the checkout.

    Those in the folder TESTS_RELEASE, made in the same way, where .ci/run has installed that wheel.
    """
    if made := os.environ.get("TESTS_RELEASE"):
        return Path(made)
    pytest.importorskip("scikit_build_core", reason="needs the dev extra")
    make = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", make, str(tmp_path)], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    subprocess.run([*command, f"--wheel-dir={tmp_path}", str(tmp_path / SDIST)], check=True)
    return tmp_path


@pytest.mark.timeout(900)
def test_the_sdist_has_all_that_a_wheel_and_the_tests_need(release: Path) -> None:
    """Unpacked in an empty folder, it has built the wheel."""
    with tarfile.open(release / SDIST) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = {"jaxhetero", "xla_ffi", "models", "bench", "lab", "deploy", "tests", "docs", "notebook"}
    tracked = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(tracked.stdout.splitlines()) <= names
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "BUILD", "pyproject.toml"} <= names
    assert not [name for name in names if re.search(r"\.(so|pyc|whl)$|(^|/)(build|\.venv|\.git)/", name)]

    (wheel,) = release.glob("*.whl")
    assert wheel.name.startswith(f"jaxhetero-{VERSION}-{TAG}-linux")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    assert package_files() <= packed
    assert not stray_files(packed)
    assert any(name.endswith("licenses/LICENSE") for name in packed)
