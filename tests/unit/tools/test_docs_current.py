"""The reference pages say what the tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documented import ROOT
from tools import make_docs

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", make_docs.PAGES)
def test_page_is_current(name: str) -> None:
    assert (make_docs.DOCS / name).read_text(encoding="utf-8") == make_docs.PAGES[name]()


def test_check_names_the_page_that_is_not_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(make_docs, "DOCS", tmp_path)
    assert make_docs.main([]) == 0
    assert make_docs.main(["--check"]) == 0
    (tmp_path / "reference" / "controls.md").write_text("old", encoding="utf-8")
    capsys.readouterr()
    assert make_docs.main(["--check"]) == 1
    assert capsys.readouterr().out == "not current: reference/controls.md\n"


def rows(page: str, heading: str) -> list[str]:
    """Return the lines of the first table below a heading."""
    _, _, below = page.partition(f"{heading}")
    lines = below.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    return lines[start:end]


@pytest.mark.parametrize(
    ("heading", "page", "title"),
    [
        ("## Common advice", "explanation/advice.md", "# Common advice"),
        ("## Levels:", "explanation/levels.md", "# Levels"),
    ],
)
def test_the_readme_has_the_same_table(heading: str, page: str, title: str) -> None:
    def plain(line: str) -> str:
        return line.replace(" (default where its self-test holds)", "")

    there = rows((make_docs.DOCS / page).read_text(encoding="utf-8"), title)
    assert [plain(line) for line in rows(README, heading)] == there


def test_the_readme_explains_every_verdict_as_the_reference_does() -> None:
    cells = [line.strip("| ").split(" | ") for line in rows(README, "## Verdicts")[2:]]
    assert {verdict.strip("`"): meaning for verdict, meaning, _ in cells} == make_docs.MEANINGS
