"""What the extension computes by itself, as Python computes it: sources and their digests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jupyter_detllm.core.source import magic_line
from tests.ui.lab import Front
from tests.vectors.make_vectors import FOLDER


@pytest.fixture(scope="module")
def core(lab_page: Front) -> Front:
    return lab_page.start_app()


def test_sources(core: Front) -> None:
    cases: list[dict[str, Any]] = json.loads((FOLDER / "sources.json").read_text())["cases"]
    found = core.core(
        "(core, cases) => cases.map("
        "c => [core.normaliseSource(c.source), core.sourceDigest(c.source)])",
        cases,
    )
    assert found == [[c["normal"], c["digest"]] for c in cases]


def test_a_cell_that_generates_is_known_alike(core: Front) -> None:
    starts = ("", " ", "\n", "\u00a0", "\u2003\n", "\ufeff", "#", "\x1c", "\u200b")
    ends = ("", " x", "\n", "s", "_", "é", "-", "\u0301", "(")
    sources = [f"{start}%%detgen{end}" for start in starts for end in ends]
    found = core.core("(core, sources) => sources.map(core.isDetgen)", sources)
    assert found == [magic_line(source) is not None for source in sources]
    outer = (
        "%%time\n",
        "%%capture a b\n \n",
        "%%bash\n",
        "%%!\n",
        "%%time\x85\n",
        "%time\n",
        "%%\n",
    )
    nested = [one + two + source for one in outer for two in ("", *outer) for source in sources]
    found = core.core("(core, sources) => sources.map(core.holdsPrompt)", nested)
    assert found == [magic_line(source) is not None for source in nested]
