"""Notebooks as people have them: 50 MB of images, a thousand stamped cells."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.errors import NotebookError
from jupyter_detllm.verify.sources import read_file
from tests.builders import cell, make_stamp, notebook, promoted, stamped_cell, with_actual

SOURCE = "%%detgen haiku\nWrite a haiku."
MEASURED = """
import sys, time
from jupyter_detllm.cli import main
code = main(sys.argv[1:])
# Not ru_maxrss: that begins with what the parent had when it forked.
status = open("/proc/self/status").read()
peak = status.partition("VmHWM:")[2].split()[0]
sys.stderr.write(f"peak {int(peak) * 1024} {time.process_time()}")
sys.exit(code)
"""


def _shown(data: dict[str, Any]) -> dict[str, Any]:
    return {"output_type": "display_data", "data": data, "metadata": {}}


def _image(seed: int, size: int = 1_500_000) -> str:
    return base64.b64encode(random.Random(seed).randbytes(size)).decode()


# Output, and how many of them make 50 MB.
LARGE: dict[str, tuple[dict[str, Any], int]] = {
    "images": (_shown({"image/png": _image(1), "text/plain": "a plot"}), 25),
    "images beside an emoji": (_shown({"image/png": _image(2), "text/plain": "a plot 📈"}), 25),
    "small images": (_shown({"image/png": _image(3, 15_000), "text/plain": "a plot"}), 2500),
    "lines": (
        {"output_type": "stream", "name": "stdout", "text": [f"é {i}\n" for i in range(100_000)]},
        25,
    ),
    "numbers": (
        _shown({"application/json": {"x": [i / 7 for i in range(80_000)]}, "text/plain": "x"}),
        25,
    ),
}


QUICK = ("images beside an emoji", "small images")


def _save(path: Path, book: dict[str, Any]) -> int:
    path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path.stat().st_size


def _command(*argv: str) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "jupyter_detllm", *argv], capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    return done.returncode


def _run(*argv: str) -> tuple[int, int, float]:
    """Return exit code, peak memory in bytes and processor seconds of a command line."""
    done = subprocess.run([sys.executable, "-c", MEASURED, *argv], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    peak, seconds = done.stderr.rpartition("peak ")[2].split()
    return done.returncode, int(peak), float(seconds)


def _book(path: Path, output: dict[str, Any], count: int) -> int:
    """Write a notebook with a cell that drifted, and `count` times the output."""
    plots = [cell(f"plot({i})", outputs=[output]) for i in range(count)]
    book = promoted(stamped_cell(SOURCE), *plots)
    again = make_stamp(SOURCE, ["An old frog."], name="haiku", fields={"torch.threads": 3})
    return _save(path, with_actual(book, 1, again))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read there")
@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in LARGE],
)
def test_50_mb_take_less_memory_than_twice_the_file(kind: str, tmp_path: Path) -> None:
    output, count = LARGE[kind]
    big, bare = tmp_path / "big.ipynb", tmp_path / "bare.ipynb"
    size = _book(big, output, count)
    _book(bare, output, 0)
    assert size > 45_000_000
    commands = {
        ("check",): 1,
        ("show",): 0,
        ("compare", str(bare)): 3,  # copies of one run
        ("stamp", "--update", "all"): 0,
        ("strip",): 0,
    }
    for command, code in commands.items():
        name, *options = command
        _, without, _ = _run(name, *options, str(bare))
        found, peak, seconds = _run(name, *options, str(big))
        assert found == code, command
        assert peak - without <= 2 * size, (command, (peak - without) / size)
        assert seconds < 60, command  # it takes one or two
    data = output.get("data", output)
    cells = json.loads(big.read_bytes())["cells"]
    assert [raw["outputs"][0].get("data", raw["outputs"][0]) for raw in cells[1:]] == [data] * count
    assert _command("stamp", str(big)) == 3  # nothing left to stamp


def test_a_thousand_stamped_cells(tmp_path: Path) -> None:
    cells = [stamped_cell(f"%%detgen c{i}\nWrite {i}.") for i in range(1000)]
    path = tmp_path / "nb.ipynb"
    _save(path, notebook(*cells))
    assert _command("stamp", str(path)) == 0
    assert _command("check", str(path)) == 3  # recorded
    book = json.loads(path.read_text())
    for raw in book["cells"]:
        raw["outputs"][0]["metadata"]["detllm_run"]["run_id"] = "again"
    _save(path, book)
    code, _, seconds = _run("check", str(path))
    assert code == 0
    assert seconds < 60  # of the processor
    assert _command("show", str(path)) == 0


def test_the_place_of_an_error_in_a_large_file_is_right(tmp_path: Path) -> None:
    path = tmp_path / "nb.ipynb"
    filler = "é" * 3_000_000
    path.write_text(f'{{\n "a": "{filler}",\n "b": "😀", oops\n}}', encoding="utf-8")
    with pytest.raises(NotebookError, match="line 3, column 12"):
        read_file(path)
    path.write_bytes(path.read_bytes() + b"\xff")
    with pytest.raises(NotebookError, match="not UTF-8 text: byte 0xff"):
        read_file(path)


def test_a_large_file_reads_as_a_small_one(tmp_path: Path) -> None:
    path = tmp_path / "nb.ipynb"
    book = {"a": "é" * 3_000_000 + "😀\ud7ff\uffff\U0010ffff", "👍": [1.5, "\n\\u00e9\\"]}
    _save(path, book)
    assert read_file(path, whole=True).data == book
