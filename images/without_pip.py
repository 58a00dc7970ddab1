"""Removes what the Python of a base image brings to install packages with. Nothing to do where it has none."""

import shutil
import sys
import sysconfig
from pathlib import Path

paths = sysconfig.get_paths()
folders = {Path(paths["purelib"]), Path(paths["platlib"]), *(Path(p) for p in sys.path if p.endswith("-packages"))}
for folder in folders:
    for name in ("pip", "setuptools", "wheel", "pkg_resources", "_distutils_hack"):
        for pattern in (name, f"{name}-*.dist-info", f"{name}-*.egg-info"):
            for found in folder.glob(pattern):
                shutil.rmtree(found)
    (folder / "distutils-precedence.pth").unlink(missing_ok=True)
for found in Path(paths["scripts"]).glob("pip*"):
    found.unlink()
shutil.rmtree(Path(paths["stdlib"]) / "ensurepip", ignore_errors=True)
