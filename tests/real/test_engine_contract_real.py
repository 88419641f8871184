from __future__ import annotations

from collections.abc import Callable

import pytest

from jupyter_detllm.engines.base import Engine
from tests import engine_contract


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_vllm_does_what_every_engine_must(
    check: Callable[[Engine], None], vllm_engine: Engine
) -> None:
    check(vllm_engine)
