"""``jupyter detllm show``: the stamped cells of notebooks, one line each."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from jupyter_detllm.cli._options import add_json, add_notebooks
from jupyter_detllm.cli._output import notice, write, write_json
from jupyter_detllm.core.canonical import Json
from jupyter_detllm.core.stamp import Stamp
from jupyter_detllm.errors import NotebookError
from jupyter_detllm.render.visible import clip, visible, width
from jupyter_detllm.verify.report import CellReport, NotebookReport
from jupyter_detllm.verify.service import check_notebook
from jupyter_detllm.verify.sources import read_file

__all__ = ["configure", "run"]

_HEAD = ("cell", "name", "level", "model", "stamp", "tokens", "finish", "late", "verdict")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_notebooks(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List the cells; 2 when a file cannot be read, else 0: nothing is judged here."""
    reports, failed = [], False
    for path in args.notebooks:
        try:
            reports.append(check_notebook(path, read_file(path).data))
        except NotebookError as error:
            notice(f"error: {error}")
            failed = True
    if args.json:
        write_json([_json(report) for report in reports])
    else:
        for report in reports:
            write("\n".join(_lines(report)))
    return 2 if failed else 0


def _row(cell: CellReport) -> dict[str, Json]:
    stamp = cell.view.actual or cell.view.reference
    return {
        "cell": cell.view.number,
        "name": cell.view.name,
        **(_stamp_row(stamp) if stamp is not None else {}),
        "side": None if stamp is None else ("output" if stamp is cell.view.actual else "reference"),
        "verdict": cell.verdict.value,
        "reasons": list(cell.outcome.reasons),
    }


def _stamp_row(stamp: Stamp) -> dict[str, Json]:
    return {
        "level": stamp.level.value,
        "self_test": stamp.self_test,
        "reach": _reach(stamp),
        "model": stamp.model.name,
        "stamp": str(stamp.digest),
        "generations": str(stamp.generation_digest),
        "fingerprint": str(stamp.fingerprint_digest),
        "tokens": [len(g.token_ids) for g in stamp.generations],
        "finish": [g.finish_reason for g in stamp.generations],
        "late": list(stamp.late),
        "from_cache": stamp.cached,
    }


def _reach(stamp: Stamp) -> Json:
    if stamp.reach is None:
        return None
    return {**asdict(stamp.reach), "beyond": stamp.beyond_reach}


def _json(report: NotebookReport) -> dict[str, Json]:
    return {
        "path": report.path,
        "problems": list(report.problems),
        "cells": [_row(cell) for cell in report.cells],
    }


def _lines(report: NotebookReport) -> list[str]:
    lines = [visible(report.path)]
    lines += [f"  problem: {visible(problem)}" for problem in report.problems]
    if not report.cells:
        return [*lines, "  no stamped cell"]
    table = [_HEAD, *(_columns(_row(cell)) for cell in report.cells)]
    widths = [max(width(row[i]) for row in table) for i in range(len(_HEAD))]
    for row in table:
        cells = (text + " " * (w - width(text)) for text, w in zip(row, widths, strict=True))
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def _columns(row: dict[str, Json]) -> tuple[str, ...]:
    texts = []
    for key in _HEAD:
        value = row.get(key)
        if isinstance(value, list):
            text = _several([str(item) for item in value])
        elif key == "stamp" and isinstance(value, str):
            text = value.removeprefix("sha256:")[:12]
        else:
            text = "" if value is None else str(value)
        texts.append(clip(visible(text), 32) or "-")
    return tuple(texts)


def _several(items: list[str]) -> str:
    distinct = list(dict.fromkeys(items))
    return distinct[0] if len(distinct) == 1 else " ".join(items)
