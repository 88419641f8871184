"""The reference pages say what the tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import make_docs


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
