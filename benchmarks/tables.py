"""Draws the documents' tables of results from benchmarks/results, so that no figure is typed by hand.

    python benchmarks/tables.py [--check]

A document says `<!-- results: FILE.json -->`, a table, `<!-- end of results -->`; what is between is written anew.
`summary:` instead of `results:` gives a line a model, with the rates alone.
Exit codes: 0 all is as drawn; 1 with --check, where a table differs from its file.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from weightsync_api.bench_result import BenchResult, BenchRow
from weightsync_api.quantity import format_delta

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PLACE = re.compile(r"(<!-- (results|summary): ([\w.-]+\.json) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def table(result: BenchResult) -> str:
    """Where and with what it was measured, and a line a row."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items() if name != "weightsync")
    lines = [
        f"{result.hardware}; {versions}; {result.date}.",
        "",
        "| model | who | how | GB/s | ms | of a copy | reserved growth | above the weights |",
        "|---|---|---|---|---|---|---|---|",
        *map(_line, result.rows),
    ]
    notes = [row for row in result.rows if row.note and not row.note.startswith("joined")]
    if notes:
        lines += ["", *(f"- {row.name}: {row.note}." for row in notes)]
    return "\n".join(lines)


def summary(result: BenchResult) -> str:
    """A line a model: the first row's rate of each who and how, in GB/s."""
    models = list(dict.fromkeys(row.model for row in result.rows))
    rates: dict[str, dict[str, float]] = {}
    for row in result.rows:
        # Plain copies are told as what they are; of ours, rows with digests or of a soak come later and don't count.
        who = f"`{row.transport}` in one process" if row.receivers == 0 else f"{row.peer or 'WeightSync'}, {row.mode}"
        rates.setdefault(who, {}).setdefault(row.model, row.gigabytes_per_second)
    order = sorted(rates, key=lambda who: (not who.startswith("WeightSync"), "in one process" in who))
    lines = [f"| GB/s | {' | '.join(models)} |", f"|---|{'---|' * len(models)}"]
    for who in order:
        cells = (f"{rates[who][model]:,.0f}" if model in rates[who] else "" for model in models)
        lines.append(f"| {who} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _line(row: BenchRow) -> str:
    cells = (
        row.model,
        row.peer or "**WeightSync**",
        f"{row.transport} {row.mode}",
        f"{row.gigabytes_per_second:,.0f}" if row.gigabytes_per_second >= 10 else f"{row.gigabytes_per_second:.1f}",
        f"{row.milliseconds:,.2f}",
        f"{row.ratio_to_copy:.2f}",
        format_delta(row.reserved_growth_bytes),
        format_delta(row.reserved_peak_bytes),
    )
    return f"| {' | '.join(cells)} |"


def drawn(text: str) -> str:
    """A document with all its tables written anew. Raises FileNotFoundError for results that are not there."""

    def replace(found: re.Match[str]) -> str:
        result = BenchResult.model_validate_json((RESULTS / found[3]).read_text())
        return f"{found[1]}\n{(table if found[2] == 'results' else summary)(result)}\n\n{found[4]}"

    return PLACE.sub(replace, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; say which documents differ")
    options = parser.parse_args()
    differ = 0
    for path in DOCUMENTS:
        old = path.read_text()
        if (new := drawn(old)) == old:
            continue
        differ += 1
        if options.check:
            print(f"{path.relative_to(ROOT)}: a table differs from its results; run: make tables", file=sys.stderr)
        else:
            path.write_text(new)
            print(f"{path.relative_to(ROOT)}: written anew")
    return 1 if options.check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
