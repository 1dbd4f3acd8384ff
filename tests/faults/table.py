"""docs/faults.md's table, of the lines that `test_matrix.py` wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def table(records: list[dict]) -> str:
    """A cell: what mended it; or how it ended."""
    lines = []
    for grid in dict.fromkeys(r["grid"] for r in records):
        rows = [r for r in records if r["grid"] == grid]
        phases = list(dict.fromkeys(r["phase"] for r in rows))
        lines += [f"**{grid}**", "", f"| fault | {' | '.join(phases)} |"]
        lines += ["| --- " * (len(phases) + 1) + "|"]
        for fault in dict.fromkeys(r["fault"] for r in rows):
            found = {r["phase"]: cell(r) for r in rows if r["fault"] == fault}
            lines.append(f"| {fault} | {' | '.join(found.get(p, '') for p in phases)} |")
        lines.append("")
    return "\n".join(lines)


def cell(record: dict) -> str:
    if record["exit_code"] != 0 or not record["same"]:
        return f"exit {record['exit_code']}" + ("" if record["same"] else ", DIFFERS")
    return ", ".join(record["events"])


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    sys.stdout.write(table([json.loads(line) for line in text.splitlines()]))
