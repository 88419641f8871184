from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.cli import main
from jupyter_detllm.core.fingerprint import PACKAGES_FIELD
from jupyter_detllm.core.notebook import KEY, read_notebook
from jupyter_detllm.core.packages import (
    LISTS_KEY,
    keep_package_list,
    list_digest,
    list_digests,
    package_lists,
    stamps_of,
)
from jupyter_detllm.core.promotion import Update, promote, strip
from jupyter_detllm.probes.software import package_list
from tests.builders import make_stamp, notebook, promoted, stamped_cell, with_actual

LIST = ("numpy==2.3.5", "torch==2.13.0+cpu")
SOURCE = "%%detgen haiku\nWrite a haiku."


def book(packages: tuple[str, ...] | None = LIST) -> dict[str, Any]:
    fields = {} if packages is None else {PACKAGES_FIELD: list_digest(packages)}
    return notebook(stamped_cell(SOURCE, make_stamp(SOURCE, name="haiku", fields=fields)))


def write(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(json.dumps(data, indent=1) + "\n")
    return path


def stored(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["metadata"][KEY]
    return found


def test_a_reference_keeps_the_digest_of_the_package_list() -> None:
    done, _ = promote(book(), Update.NEW)
    view = read_notebook(done)
    (reference,) = stamps_of(view)
    assert reference is view.cells[0].reference
    assert list_digests(view, str(reference.fingerprint_digest)) == {list_digest(LIST)}


def test_the_digest_of_the_list_is_no_part_of_fingerprint_or_stamp() -> None:
    one, two = (
        make_stamp(SOURCE, fields={PACKAGES_FIELD: list_digest(packages)})
        for packages in (LIST, LIST[:1])
    )
    assert one.fingerprint_digest == two.fingerprint_digest
    assert one.digest == two.digest
    assert one.to_json() != two.to_json()


def test_a_list_is_read_back_only_under_its_own_digest() -> None:
    kept = keep_package_list(promote(book(), Update.NEW)[0], LIST)
    assert package_lists(kept) == {list_digest(LIST): LIST}
    assert keep_package_list(kept, LIST) is kept
    kept["metadata"][KEY][LISTS_KEY][list_digest(LIST)].append("evil==1")
    assert package_lists(kept) == {}


@pytest.mark.parametrize(
    "wrong",
    [None, 7, [], ["a==1"], {"x": "a==1"}, {"x": [1]}, {"x": ["a\nb"]}, {"x": ["a"] * 6000}],
)
def test_a_malformed_list_is_no_list(wrong: object) -> None:
    assert package_lists({"metadata": {KEY: {LISTS_KEY: wrong}}}) == {}
    assert package_lists({"metadata": wrong}) == {}


def test_a_digest_that_is_none_is_not_one() -> None:
    fields = {PACKAGES_FIELD: "sha256:\x1b[31m"}
    view = read_notebook(notebook(stamped_cell(SOURCE, make_stamp(SOURCE, fields=fields))))
    assert list_digests(view, str(stamps_of(view)[0].fingerprint_digest)) == frozenset()


def test_promotion_keeps_a_stored_list_and_strip_removes_it() -> None:
    kept = keep_package_list(promote(book(), Update.NEW)[0], LIST)
    again, _ = promote(with_actual(kept, 1, make_stamp(SOURCE, ["Other."])), Update.ALL)
    assert package_lists(again) == {list_digest(LIST): LIST}
    assert KEY not in strip(again)[0]["metadata"]


def test_with_packages_stores_the_list_where_it_is_the_stamped_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "nb.ipynb", book(package_list()))
    assert main(["stamp", "--with-packages", str(path)]) == 0
    count = len(package_list())
    assert f"it holds the package list: {count} packages" in capsys.readouterr().out
    assert package_lists(json.loads(path.read_text())) == {
        list_digest(package_list()): package_list()
    }
    before = path.read_bytes()
    assert main(["stamp", "--with-packages", str(path)]) == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("packages", "said"), [(LIST, "stamped is"), (None, "no stamp holds the digest of one")]
)
def test_with_packages_refuses_another_list_and_stamps_all_the_same(
    packages: tuple[str, ...] | None,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path / "nb.ipynb", book(packages))
    assert main(["stamp", "--with-packages", str(path)]) == 3
    out = capsys.readouterr().out
    assert "the package list was not stored" in out
    assert said in out
    assert LISTS_KEY not in stored(path)
    assert stored(path)["cells"]


def test_a_kept_reference_weighs_more_than_a_missing_list(tmp_path: Path) -> None:
    data = promoted(stamped_cell(SOURCE, make_stamp(SOURCE, name="haiku")))
    other = make_stamp(SOURCE, ["An old frog."], name="haiku")
    path = write(tmp_path / "nb.ipynb", with_actual(data, 1, other))
    assert main(["stamp", "--with-packages", str(path)]) == 1
