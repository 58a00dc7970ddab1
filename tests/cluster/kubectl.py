"""kubectl on one cluster."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Tree = dict[str, Any]

WAIT = "--timeout=150s"
"""Of a kubectl that waits. Only ends what would not end: a machine may stall for a minute."""
RUN_SECONDS = 180.0


class Kubectl:
    """Asks and tells a cluster by its `kubeconfig`. `program`: kubectl; `home`: where it keeps its cache."""

    def __init__(self, program: Path, kubeconfig: Path, home: Path) -> None:
        self.program = program
        self.kubeconfig = kubeconfig
        self.environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "HOME": str(home)}

    def command(self, *arguments: str) -> list[str]:
        return [str(self.program), *arguments]

    def run(
        self, *arguments: str, stdin: str = "", check: bool = True, timeout: float = RUN_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*arguments),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self.environment,
        )
        assert not check or done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        return self.run(*arguments, stdin=stdin).stdout

    def apply(self, tree: Mapping[str, Any], namespace: str) -> subprocess.CompletedProcess[str]:
        return self.run("-n", namespace, "apply", "-f", "-", stdin=json.dumps(tree), check=False)

    def get(self, kind: str, name: str, namespace: str) -> Tree | None:
        done = self.run("-n", namespace, "get", kind, name, "-o", "json", "--ignore-not-found")
        found: Tree | None = json.loads(done.stdout) if done.stdout.strip() else None
        return found

    def list(self, kinds: str, namespace: str, *arguments: str) -> list[Tree]:
        items: list[Tree] = json.loads(self.kubectl("-n", namespace, "get", kinds, *arguments, "-o", "json"))["items"]
        return items
