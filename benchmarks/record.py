"""Rows: the columns of every measurement, files of rows, and `python -m benchmarks.record FILE`, which keeps a run.

The results of a device, `results/<device>.csv`, only grow: rows of new runs go to the end, and nothing else is written.
"""

import argparse
import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks.command import run_command
from cute_fa.core.errors import expected

RESULTS = Path(__file__).parent / "results"

# Columns that do not apply to a row are empty. Units: ms_* milliseconds a call, gbps 1e9 bytes a second.
COLUMNS = (
    "run",
    "date",
    "commit",
    "device",
    "driver",
    "torch",
    "dsl",
    "suite",
    "direction",
    "variant",
    "op",
    "dtype",
    "batch",
    "seqlen_q",
    "seqlen_k",
    "heads_q",
    "heads_kv",
    "head_dim",
    "head_dim_v",
    "mask",
    "m",
    "n",
    "k",
    "backend",
    "config",
    "ms_p20",
    "ms_p50",
    "ms_p80",
    "tflops",
    "gbps",
    "clock_mhz",
    "cublas_tflops",
    "reason",
)

Row = dict[str, str]


def read_rows(path: Path) -> list[Row]:
    """Raises ValueError unless the file's header is COLUMNS and each line has as many cells."""
    if not path.is_file():
        refuse("FILE", "a file of rows", str(path))
    with path.open(newline="") as file:
        reader = csv.DictReader(file, restkey="beyond", restval=None)
        found, rows = reader.fieldnames or [], list(reader)
    if tuple(found) != COLUMNS:
        unknown, missing = (", ".join(names) or "none" for names in (set(found) - {*COLUMNS}, set(COLUMNS) - {*found}))
        refuse("FILE", "the columns of benchmarks/record.py, in their order", f"unknown {unknown}; missing {missing}")
    for number, row in enumerate(rows, start=1):
        if "beyond" in row or None in row.values():
            refuse("FILE", f"{len(COLUMNS)} cells a row", f"others in row {number}")
    return rows


def begin(path: Path) -> None:
    """Makes `path` a file to which rows can be added, or raises ValueError before anything is measured for it."""
    try:
        append_rows(path, ())
    except OSError as error:
        got = f"{path} ({error.strerror})"
        raise ValueError(
            expected("output", "a file that can be written", got, "Name one in a folder that exists")
        ) from None
    read_rows(path)


def append_rows(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """Adds rows to a file of rows, which is begun where it is missing or empty. They are on disk when this returns."""
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerows(rows)


def results_file(rows: Sequence[Row], folder: Path) -> Path:
    """h200.csv for the rows of an "NVIDIA H200". The rows of one file come from one device."""
    devices = sorted({row["device"] for row in rows})
    if len(devices) != 1 or not devices[0]:
        refuse("FILE", "rows of one device", f"{len(rows)} rows of {', '.join(map(repr, devices)) or 'none'}")
    words = re.findall(r"[a-z0-9]+", devices[0].lower().removeprefix("nvidia "))
    return folder / f"{'_'.join(words)}.csv"


def record(source: Path, folder: Path) -> Path:
    """Appends the rows of `source` to the results of their device; raises ValueError where they are there already."""
    rows = read_rows(source)
    results = results_file(rows, folder)
    if results.exists():
        known = {row["run"] for row in read_rows(results)} & {row["run"] for row in rows}
        if known:
            refuse("FILE", f"runs that {results.name} does not have", ", ".join(sorted(known)))
    append_rows(results, rows)
    return results


def refuse(argument: str, rule: str, got: str) -> NoReturn:
    raise ValueError(expected(argument, rule, got, "Give a file that benchmarks.run wrote, each run once"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.record", description="Keep the rows of a run.")
    parser.add_argument("file", type=Path, metavar="FILE", help="rows, as benchmarks.run wrote them")
    source = parser.parse_args(arguments).file
    results = record(source, RESULTS)
    print(f"{len(read_rows(source))} rows added to {results}")


if __name__ == "__main__":
    run_command(main, "benchmarks.record")
