"""One control plane for all tests of this folder, and a namespace for each test."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator

import pytest
from control_plane import ControlPlane, programs
from weightsync_api.crd import render


@pytest.fixture(scope="session")
def cluster() -> Iterator[ControlPlane]:
    """With the CustomResourceDefinition of WeightSync."""
    folder = programs()
    if folder is None:
        pytest.skip("the programs of Kubernetes are not built: make test-cluster builds them, with Go, and runs these")
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing, which makes the control plane's key")
    with ControlPlane(folder) as plane:
        plane.kubectl("apply", "--server-side", "-f", "-", stdin=render())
        plane.kubectl("wait", "--for=condition=Established", "crd/weightsyncs.weightsync.dev", "--timeout=30s")
        yield plane


@pytest.fixture
def namespace(cluster: ControlPlane) -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")
