"""Events of a run as possible causes: preemptions, and the KV blocks that lead to them."""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import RUN_KEY
from jupyter_detllm.render.explain import explain
from jupyter_detllm.verify.service import check_notebook
from tests.builders import make_stamp, promoted, stamped_cell, with_actual

SOURCE = "%%detgen haiku\nx"


def lines(
    noted: object, blocks: tuple[int, int] = (512, 512), level: Level = Level.REPEATABLE
) -> str:
    left, right = (
        make_stamp(SOURCE, [t], name="haiku", level=level, fields={"engine.kv_blocks": n})
        for t, n in zip(("An old pond.", "An old frog."), blocks, strict=True)
    )
    book = with_actual(promoted(stamped_cell(SOURCE, left)), 1, right)
    run: dict[str, Any] = book["cells"][0]["outputs"][0]["metadata"][RUN_KEY]
    run["preemptions"] = noted
    (cell,) = check_notebook("a.ipynb", book).cells
    return "\n".join(line.text for line in explain(cell, "a.ipynb"))


def test_preemptions_are_a_possible_cause() -> None:
    said = "requests were preempted (3 now) and computed again in other batches"
    assert said in lines(3)
    assert f"{said}; engine.kv_blocks: 512 -> 64" in lines(3, (512, 64))


def test_other_kv_blocks_are_one_where_the_recorded_run_may_have_preempted() -> None:
    said = "a side may have preempted requests; engine.kv_blocks: 64 -> 512"
    assert said in lines(0, (64, 512))


@pytest.mark.parametrize("noted", [0, None, "3", -1, True])
def test_nothing_is_said_without_any(noted: object) -> None:
    assert "preempt" not in lines(noted)


def test_a_level_that_does_not_depend_on_the_batch_has_no_such_cause() -> None:
    assert "preempt" not in lines(3, (512, 64), Level.INVARIANT)
