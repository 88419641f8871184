"""Engine options: one spelling, and the ranks they ask for."""

from __future__ import annotations

import pytest

from jupyter_detllm.core.options import option_flag, option_name, option_size, ranks_of


@pytest.mark.parametrize("spelled", ["--max-model-len", "max_model_len", "max-model-len"])
def test_every_spelling_is_one_name(spelled: str) -> None:
    assert option_name(spelled) == "max_model_len"
    assert option_flag(option_name(spelled)) == "--max-model-len"


def test_sizes_are_read_however_they_are_spelled() -> None:
    options = {"--tensor-parallel-size": "2", "data_parallel_size": 3, "pipeline_parallel_size": ""}
    assert option_size(options, "tensor_parallel_size") == 2
    assert option_size(options, "pipeline_parallel_size") == 1
    assert ranks_of(options) == 6
    assert ranks_of({}) == 1
