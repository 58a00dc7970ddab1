"""What no code of the project may do, but in the one place that is named here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "agent", ROOT / "crds", ROOT / "operator"]
SOURCES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))

OBJECT_WIRE = ROOT / "agent" / "weightsync_agent" / "engines" / "object_wire.py"
"""verl's, checkpoint-engine's and SGLang's protocols carry pickle; this module alone may."""
READS_OBJECTS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RUNS_TEXT = {"eval", "exec", "compile"}


def test_there_is_code_to_guard() -> None:
    assert len(SOURCES) > 100
    assert OBJECT_WIRE in SOURCES


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_object_wire_knows_pickle_and_nothing_forces_a_collection(path: Path) -> None:
    text = path.read_text()
    assert "gc.collect" not in text
    if path == OBJECT_WIRE:
        return
    assert "pickle" not in text.lower()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            assert not READS_OBJECTS & {alias.name.split(".")[0] for alias in node.names}, f"line {node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            assert (node.module or "").split(".")[0] not in READS_OBJECTS, f"line {node.lineno}"
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                assert node.func.id not in RUNS_TEXT, f"line {node.lineno}"
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                called = f"{node.func.value.id}.{node.func.attr}"
                assert called not in {"torch.load", "torch.save", "numpy.load", "np.load"}, f"line {node.lineno}"
                # ZeroMQ's and multiprocessing's own short cuts to it.
            if isinstance(node.func, ast.Attribute):
                assert node.func.attr not in {"send_pyobj", "recv_pyobj"}, f"line {node.lineno}"


def test_the_object_wire_reads_through_its_allow_list_alone() -> None:
    """No call in it deserialises but the restricted reader's `load`."""
    calls = [node for node in ast.walk(ast.parse(OBJECT_WIRE.read_text())) if isinstance(node, ast.Call)]
    reading = [
        node
        for node in calls
        if isinstance(node.func, ast.Attribute) and node.func.attr in {"load", "loads", "Unpickler", "_Unpickler"}
    ]
    assert [ast.unparse(node) for node in reading] == ["_Reader(message, peer).load()"]
