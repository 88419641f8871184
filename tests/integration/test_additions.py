"""What design.md says is enough to add something: made in a copy of the package, and used.

Each addition is called ``moon``. It touches the files that its row of the table names, and no
other.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.builders import make_stamp, promoted, stamped_cell, with_actual
from tests.plugin_package import EXAMPLE, environment_with, write_metadata
from tests.waiting import HANGS

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "%%detgen haiku\nWrite a haiku."
BOOK = with_actual(promoted(stamped_cell(SOURCE)), 1, make_stamp(SOURCE, name="haiku"))

SHELL = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "jupyter_detllm")
for source in sys.argv[1:]:
    shell.run_cell(source).raise_error()
"""


@dataclass(frozen=True)
class Addition:
    """What is put into a file after a text that stands there; what then shows what.

    Attributes
    ----------
    after
        File to pairs of the text and what follows it; the text "" begins or ends a file.
    command
        A command line of jupyter-detllm; with `in_shell`, cells that are run.
    shows
        What is then printed, or written to ``out``.
    """

    after: Mapping[str, tuple[tuple[str, str], ...]]
    command: tuple[str, ...]
    shows: str
    in_shell: bool = False
    code: int = field(default=0)


ADDITIONS = {
    "a fingerprint field": Addition(
        {
            "core/fields.py": (
                (
                    "_HARDWARE = (\n",
                    '_row("hardware.moon", _NUM, 1, "phase of the moon", "It pulls.", "wait"),\n',
                ),
            ),
            "probes/hardware.py": (
                ("informational, and a separate field.\n", '"hardware.moon": "waxing",\n'),
            ),
        },
        ("fingerprint", "--json"),
        '"hardware.moon": "waxing"',
    ),
    "a determinism control": Addition(
        {
            "controls/environ.py": (
                (
                    "ENV_CONTROLS: tuple[EnvControl, ...] = (\n",
                    'EnvControl("MOON", "7", _ALL, None, ("any",), '
                    'ProcessEvent.ENGINE_START, "", ""),\n',
                ),
            )
        },
        ("%detllm --level seeded", "import os; print('MOON is', os.environ['MOON'])"),
        "MOON is 7",
        in_shell=True,
    ),
    "an engine": Addition(
        {
            "engines/moon/engine.py": (
                ("", (EXAMPLE / "detllm_echo.py").read_text().replace('"echo"', '"moon"')),
            ),
            "pyproject.toml": (
                (
                    '[project.entry-points."jupyter_detllm.engines"]\n',
                    'moon = "jupyter_detllm.engines.moon.engine:EchoEngine"\n',
                ),
            ),
        },
        ("%detllm use moon", "%%detgen\nOnce in a blue moon."),
        "Once in a blue moon.",
        in_shell=True,
    ),
    "a verdict rule": Addition(
        {
            "core/verdict.py": (
                (
                    "RULES: tuple[Rule, ...] = (\n",
                    'Rule("moon", Verdict.STALE, lambda facts: ("the moon is full",)),\n',
                ),
            )
        },
        ("check", "nb.ipynb"),
        "the moon is full",
        code=3,
    ),
    "a report format": Addition(
        {
            "render/moon.py": (
                ("", "def render(report):\n    return f'{len(report.cells)} moon\\n'\n"),
            ),
            "render/__init__.py": (("FORMATS: dict[str, str] = {\n", '"moon": "a moon",\n'),),
        },
        ("check", "nb.ipynb", "--moon", "out"),
        "1 moon\n",
    ),
    "an export format": Addition(
        {
            "export/formats.py": (
                (
                    'PYLOCK = "pylock"\n',
                    "def moon_text(environment):\n    return 'the moon is made of cheese\\n'\n",
                ),
                (
                    "FORMATS: Mapping[str, Callable[[Environment], str]] = {\n",
                    '"moon": moon_text,\n',
                ),
            )
        },
        ("export", "nb.ipynb", "--to", "moon"),
        "the moon is made of cheese",
    ),
    "a finding of `doctor`": Addition(
        {
            "doctor/kinds/environment.py": (
                (
                    "]\n\n",
                    "def find_moon(scene):\n"
                    "    return [Finding(Severity.NOTE, 'the moon is full', 'wait')]\n",
                ),
            ),
            "doctor/table.py": (
                (
                    "KINDS: tuple[Kind, ...] = (\n",
                    'Kind("moon", "environment", Subject.MACHINE, "the moon", ALWAYS),\n',
                ),
            ),
        },
        ("doctor", "--json"),
        '"the moon is full"',
        code=-1,
    ),
    "a subcommand": Addition(
        {
            "cli/moon.py": (
                (
                    "",
                    "def configure(parser):\n    parser.add_argument('phase')\n"
                    "def run(args):\n    print('the moon is', args.phase)\n    return 0\n",
                ),
            ),
            "cli/__init__.py": (
                (
                    "COMMANDS: tuple[Command, ...] = (\n",
                    'Command("moon", "show the moon"),\n',
                ),
            ),
        },
        ("moon", "full"),
        "the moon is full",
    ),
}


def rows() -> dict[str, str]:
    """Return the table "to add / touch" of design.md."""
    text = (ROOT / "docs" / "explanation" / "design.md").read_text(encoding="utf-8")
    table = text.partition("| to add | touch |")[2].partition("\n\n")[0]
    cells = [line.strip("|").split("|") for line in table.splitlines() if "---" not in line]
    return {row[0].strip(): row[1] for row in cells if len(row) > 2}


def is_named(path: str, touch: str) -> bool:
    spelled = path.replace("moon", "NAME")
    for word in re.findall(r"`([^`]+)`", touch):
        module = f"{word.partition('.')[0]}/__init__.py"
        if word.replace("VERB", "NAME") in (spelled, f"{path.partition('/')[0]}/"):
            return True
        if (word.endswith("/") and path.startswith(word)) or module == path:
            return True
    return path == "pyproject.toml" and "an entry point" in touch


def test_the_table_of_design_and_the_additions_are_the_same() -> None:
    found = rows()
    assert set(found) == set(ADDITIONS)
    for name, addition in ADDITIONS.items():
        assert [p for p in addition.after if not is_named(p, found[name])] == [], name


@pytest.mark.parametrize("name", ADDITIONS)
def test_the_named_files_suffice(name: str, tmp_path: Path) -> None:
    addition = ADDITIONS[name]
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    skipped = shutil.ignore_patterns("__pycache__", "labextension")
    shutil.copytree(ROOT / "jupyter_detllm", tmp_path / "jupyter_detllm", ignore=skipped)
    (tmp_path / "nb.ipynb").write_text(json.dumps(BOOK))
    assert addition.shows not in used(addition, tmp_path)
    for path, changes in addition.after.items():
        file = tmp_path / path if path == "pyproject.toml" else tmp_path / "jupyter_detllm" / path
        file.parent.mkdir(exist_ok=True)
        text = file.read_text() if file.exists() else ""
        for before, added in changes:
            assert before in text, f"{path} has no {before!r}"
            text = text.replace(before, before + added, 1)
        file.write_text(text)
    write_metadata(tmp_path / "pyproject.toml", tmp_path)
    shown = used(addition, tmp_path, addition.code)
    assert addition.shows in shown


def used(addition: Addition, folder: Path, code: int | None = None) -> str:
    """Run the addition's command with the copy; return what it prints and writes."""
    way = ["-c", SHELL] if addition.in_shell else ["-m", "jupyter_detllm"]
    done = subprocess.run(
        [sys.executable, *way, *addition.command],
        cwd=folder,
        env=environment_with(folder),
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    if code is not None and code >= 0:
        assert done.returncode == code, done.stdout + done.stderr
    written = folder / "out"
    return done.stdout + (written.read_text() if written.exists() else "")
