"""The images that `tests/cluster/images.sh build` made: what is in them; that they run as a restricted pod would."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from pod_cluster import MODEL, must_not_skip

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "tests" / "cluster" / "images.sh"
LOCK_LINE = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)(?: ; ([^\\]+))? \\$")

INSTALLED = """
import importlib.metadata, json, platform, sys
found = sorted((d.metadata["Name"], d.version) for d in importlib.metadata.distributions())
print(json.dumps({"packages": found, "python": platform.python_version(), "prefix": sys.prefix}))
"""
LAUNCHER = """
import os, triton.backends.nvidia as nvidia
from triton.runtime.build import compile_module_from_file
home = os.path.dirname(nvidia.__file__)
compile_module_from_file(
    src_path=f"{home}/driver.c", name="cuda_utils", library_dirs=[f"{home}/lib"],
    include_dirs=[f"{home}/include"], libraries=["libcuda.so.1"],
)
"""
RUN = """
apiVersion: weightsync.dev/v1alpha1
kind: WeightSync
metadata: {name: inside}
spec:
  device: CPU
  placement: Colocated
  sender: {source: {synthetic: {model: /tmp/config.json, dtype: float32}}}
  receivers: {replicas: 1}
  transfer: {verify: {mode: Digest, everySteps: 1}}
  steps: {count: 3}
"""


def why_not() -> str:
    """Why the images can't be looked at; empty where they can."""
    if os.geteuid() != 0:
        return "images are built and entered as root"
    if shutil.which("buildah") is None:
        return "buildah is missing: make images installs it on Debian"
    for name in ("operator", "agent"):
        if inside(name, "true").returncode != 0:
            return f"the image {name} is not built: make images builds it"
    return ""


def inside(name: str, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """As a restricted pod: read-only root file system, the image's user, a /tmp of its own."""
    return subprocess.run(
        [SCRIPT, "run", name, *command], input=stdin, capture_output=True, text=True, check=False, timeout=240
    )


def told(name: str, *command: str, stdin: str = "") -> str:
    done = inside(name, *command, stdin=stdin)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module", params=["operator", "agent"])
def image(request: pytest.FixtureRequest, built: None) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def built() -> None:
    reason = why_not()
    if reason and must_not_skip():
        pytest.fail(f"{reason} (WEIGHTSYNC_NO_SKIP is set: nothing is skipped)")
    if reason:
        pytest.skip(reason)


def locked(lock: Path, python: str) -> dict[str, str]:
    """Package -> version, of a lock file's lines for Linux and this Python."""
    found = {}
    for name, number, marker in (m.groups() for m in map(LOCK_LINE.match, lock.read_text().splitlines()) if m):
        environment = {"python_full_version": python, "python_version": ".".join(python.split(".")[:2])}
        if marker is None or Marker(marker).evaluate(environment):
            found[name] = number
    return found


def test_its_user_is_a_number_that_is_not_root(image: str) -> None:
    assert told(image, "id", "-u").strip() == "65532"
    assert told(image, "id", "-G").split() == ["65532"]


def test_nothing_that_builds_or_installs_is_left(image: str) -> None:
    tools = ("pip", "pip3", "gcc", "cc", "c++", "clang", "make", "ld", "apt-get", "git", "curl", "uv")
    found = told(image, "sh", "-c", f"for tool in {' '.join(tools)}; do command -v $tool; done; true")
    assert found == ""
    for python in ("python", "/usr/bin/python3"):
        for module in ("pip", "ensurepip"):
            asked = inside(image, python, "-c", f"import {module}")
            assert "ModuleNotFoundError" in asked.stderr, f"{python} has {module}"
    kept = {"operator": ["packages.lock", "venv"], "agent": ["launcher", "packages.lock", "venv"]}
    assert told(image, "ls", "-A", "/opt").split() == kept[image]


def test_what_is_installed_is_what_is_locked_and_nothing_else(image: str) -> None:
    found = json.loads(told(image, "python", "-c", INSTALLED))
    expected = locked(ROOT / "images" / f"{image}.lock", found["python"]) | {"weightsync": version("weightsync")}
    names = {re.sub(r"[-_.]+", "-", name).lower(): number for name, number in found["packages"]}
    assert names == expected
    assert len(names) > 20


def test_the_root_file_system_can_be_read_only(image: str) -> None:
    assert "Read-only file system" in inside(image, "touch", "/opt/venv/x").stderr
    assert "Usage: weightsync" in told(image, f"weightsync-{image}", "--help")
    assert version("weightsync") in told(image, "weightsync", "--version")


def test_the_operator_has_no_torch(built: None) -> None:
    assert "ModuleNotFoundError" in inside("operator", "python", "-c", "import torch").stderr
    assert told("operator", "find", "/opt/venv", "-size", "+30M") == ""


def test_the_agent_moves_weights_without_anything_from_outside(built: None) -> None:
    script = 'cat > /tmp/config.json; echo "$0" > /tmp/run.yaml; exec weightsync run /tmp/run.yaml'
    said = told("agent", "sh", "-c", script, RUN, stdin=json.dumps(MODEL))
    assert "inside done: 3 steps, receivers 1/1, verified 3 of 3" in said


def test_triton_gets_its_launcher_without_a_compiler(built: None) -> None:
    """Compiled when the image was made. It can't be loaded here: the driver's library comes with a GPU."""
    asked = inside("agent", "python", "-c", LAUNCHER)
    assert "ImportError: libcuda.so.1: cannot open shared object file" in asked.stderr, asked.stderr


def test_another_c_file_is_refused_in_a_sentence(built: None) -> None:
    asked = inside("agent", "sh", "-c", "echo > /tmp/x.c; $CC /tmp/x.c -o /tmp/x.so")
    assert asked.returncode == 1
    assert "this image has no C compiler, and /tmp/x.c is not the file" in asked.stderr


def test_locks_name_no_index_and_hash_every_file() -> None:
    for lock in (ROOT / "images").glob("*.lock"):
        text = lock.read_text()
        assert "://" not in text
        assert "-index" not in text
        requirements = re.findall(r"^[a-z][^\n]*\n(?:    --hash=sha256:[0-9a-f]{64}[ \\]*\n?)+", text, re.MULTILINE)
        assert len(requirements) == len(re.findall(r"^[a-z]", text, re.MULTILINE)) > 0


@pytest.mark.parametrize("name", ["operator", "agent"])
def test_locks_hold_all_that_the_project_asks_for(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = locked(ROOT / "images" / f"{name}.lock", "3.11.0")
    for asked in map(Requirement, [*project["dependencies"], *project["optional-dependencies"][name]]):
        assert asked.name in pinned, f"{asked} is not in images/{name}.lock: make lock writes it anew"
        assert asked.specifier.contains(pinned[asked.name]), f"images/{name}.lock is older than {asked}: make lock"
