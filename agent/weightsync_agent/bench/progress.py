"""What a long measurement is at, on stderr: one line that is written over on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time

import click

EVERY_SECONDS = 5.0


class Progress:
    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._shown_at = 0.0
        self._head = ""
        self._open = False

    def head(self, text: str) -> None:
        """A new part of the work: always shown."""
        self._head = text
        if not self._live:
            click.echo(text, err=True)
        self._shown_at = 0.0 if self._live else time.monotonic()

    def __call__(self, text: str) -> None:
        """Where the part is; shown on a terminal ten times a second at most, elsewhere every EVERY_SECONDS."""
        now = time.monotonic()
        if now - self._shown_at < (0.1 if self._live else EVERY_SECONDS):
            return
        self._shown_at = now
        if self._live:
            click.echo(f"\r\x1b[K{self._head}: {text}", nl=False, err=True)
            self._open = True
        else:
            click.echo(f"{self._head}: {text}", err=True)

    def end(self) -> None:
        """Takes the line off the terminal."""
        if self._open:
            click.echo("\r\x1b[K", nl=False, err=True)
            self._open = False
