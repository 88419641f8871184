"""The magics' line: quotes, options, hints, and the engine's own options."""

from __future__ import annotations

import pytest

from jupyter_detllm.core.notebook import read_notebook
from jupyter_detllm.errors import UsageError, nearest
from jupyter_detllm.kernel.arguments import (
    check_model,
    detgen_help,
    detgen_parser,
    refuse_variables,
    setup_parser,
    split_line,
    without_comment,
)
from jupyter_detllm.kernel.commands import VERBS, detllm_help
from jupyter_detllm.kernel.session import engine_value, merged


def detgen(line: str) -> dict[str, object]:
    return vars(detgen_parser().parse(split_line(line)))


def use(line: str) -> tuple[dict[str, object], dict[str, object]]:
    arguments = vars(VERBS["use"].parser.parse(split_line(line)))
    return arguments, arguments.pop("engine_options")


def test_split_line_groups_quotes_and_keeps_hashes() -> None:
    assert split_line("""a "b c" 'd "e"' f\\'s #g""") == ["a", "b c", 'd "e"', "f's", "#g"]


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("--seed 42   # first: the machine's seeds", "--seed 42  "),
        ("use demo #", "use demo"),
        ("# nothing", ""),
        ("check 'a # b.ipynb'  # the file", "check 'a # b.ipynb' "),
        ("use ./a#b", "use ./a#b"),
        ("use #a", "use #a"),
        ("check 'open # quotation", "check 'open # quotation"),
    ],
)
def test_a_comment_may_follow_the_line_magic(line: str, kept: str) -> None:
    assert without_comment(line) == kept


def test_an_open_quotation_is_one_line() -> None:
    with pytest.raises(UsageError, match="does not end"):
        split_line("--system don't")


@pytest.mark.parametrize(
    "line", ["--temperature $t", "$t", "--system 'Be $t.'", "--system {t}", "--seed {t}", "$other"]
)
def test_a_variable_on_the_line_is_refused(line: str) -> None:
    with pytest.raises(UsageError, match=r"is not replaced by the variable.*det\.generate"):
        refuse_variables(split_line(line), {"t": 0.5})


@pytest.mark.parametrize(
    "line",
    ["--stop $", r"--expect '^\d{2}$'", "--system 'It costs $5, {or} $more.'", "--stop '$ t'"],
)
def test_other_dollars_and_braces_stay(line: str) -> None:
    refuse_variables(split_line(line), {"t": 0.5})


def test_every_option_of_the_design_is_read() -> None:
    given = detgen(
        "haiku-1 --system 'Be brief.' --temperature 0.7 --top-p 0.9 --top-k 5 --max-tokens 12 -n 2 "
        "--stop '\\n' --stop END --seed 7 --beam-width 3 --length-penalty 0.5 "
        "--policy 'within(1e-3)' --out answers --fill --no-split --no-store-prompt "
        "--expect '^a' --tries 3 --unmet warn --cache --verify-sample 0.1"
    )
    assert given == {
        "name": "haiku-1",
        "text": False,
        "messages": False,
        "system": "Be brief.",
        "no_split": True,
        "fill": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "max_tokens": 12,
        "n": 2,
        "stop": ["\n", "END"],
        "seed": 7,
        "beam_width": 3,
        "length_penalty": 0.5,
        "policy": "within(1e-3)",
        "out": "answers",
        "no_store_prompt": True,
        "expect": "^a",
        "tries": 3,
        "unmet": "warn",
        "cache": True,
        "verify_sample": 0.1,
    }
    assert detgen("--no-cache")["cache"] is False
    assert detgen("")["cache"] is None


@pytest.mark.parametrize(("spelled", "meant"), [("a\\\\nb", "a\\nb"), ("\\t", "\t"), ("x", "x")])
def test_stop_escapes(spelled: str, meant: str) -> None:
    assert detgen(f"--stop '{spelled}'")["stop"] == [meant]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--temprature 0.3", "has no option '--temprature'; did you mean --temperature?"),
        ("--temp 0.3", "has no option '--temp'"),
        ("--max_tokens=3", "did you mean --max-tokens?"),
        ("-t 3", "has no option '-t'"),
        ("--temperature inf", "invalid float value"),
        ("--temperature", "expected one argument"),
        ("-n x", "-n: invalid int value"),
        ("a b", "no place for 'b'"),
        ("9a", "not a cell name"),
        ("--out a.b", "not a variable name"),
        ("--stop ''", "empty stop string"),
        ("--text --messages", "not allowed with"),
    ],
)
def test_mistakes_are_one_line_and_point_at_the_help(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        detgen(line)
    assert message in str(caught.value)
    assert str(caught.value).endswith("Try: %%detgen?")
    assert "\n" not in str(caught.value)


def test_options_are_not_abbreviated() -> None:
    with pytest.raises(UsageError, match=r"did you mean --temperature\?"):
        detgen("--temperatur 1")


def test_negative_numbers_are_values() -> None:
    assert detgen("--top-k -1")["top_k"] == -1


def test_the_parsers_name_is_the_one_the_file_check_reads() -> None:
    for line in ("haiku", "haiku --temperature 0", "a.b-c_1 -n 2"):
        cell = {"cell_type": "code", "source": f"%%detgen {line}\nhi", "outputs": []}
        view = read_notebook({"nbformat": 4, "cells": [cell]})
        assert view.cells[0].name == detgen(line)["name"]


def test_use_separates_our_options_from_the_engines() -> None:
    ours, engine = use(
        "demo --max-model-len 4096 --seed 3 dtype=bfloat16 --gpu-memory-utilization=0.5 "
        "--enforce-eager --no-enable-prefix-caching --level seeded"
    )
    assert (ours["model"], ours["seed"], ours["level"]) == ("demo", 3, "seeded")
    assert engine == {
        "max_model_len": "4096",
        "dtype": "bfloat16",
        "gpu_memory_utilization": "0.5",
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }


def test_use_knows_flags_of_ours_before_engine_options() -> None:
    ours, engine = use("fake --eager --no-tf32 --drift-salt x")
    assert ours["eager"] is True
    assert ours["no_tf32"] is True
    assert engine == {"drift_salt": "x"}


def test_a_flag_before_an_assignment_takes_no_value() -> None:
    assert use("fake --batch-sensitive delay_ms=3")[1] == {
        "batch_sensitive": True,
        "delay_ms": "3",
    }


def test_values_may_hold_equals_signs() -> None:
    for line in ("fake --drift-field engine.dtype=x", "fake --drift-field=engine.dtype=x"):
        assert use(line)[1] == {"drift_field": "engine.dtype=x"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "needs a model first"),
        ("--max-model-len 3 demo", "needs a model first"),
        ("demo fake", "no place for 'fake'"),
        ("demo a=1 --a 2", "'a' is given twice"),
        ("demo -tp 2", "no place for '-tp'"),
        ("demo --level best", "invalid choice: 'best'"),
        ("fkae", "did you mean fake?"),
        ("demos", "did you mean demo?"),
    ],
)
def test_use_mistakes(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        use(line)
    assert message in str(caught.value)


@pytest.mark.parametrize("model", ["gpt2", "Qwen/Qwen3-0.6B", "demo", "fake", "./models/x"])
def test_other_model_names_are_the_engines_to_judge(model: str) -> None:
    check_model(model)


def test_python_values_become_engine_options() -> None:
    assert merged({"a_b": 0.5, "c": {"y": 1, "x": 2}, "d": True, "e": None}) == {
        "a_b": "0.5",
        "c": '{"x": 2, "y": 1}',
        "d": True,
        "e": None,
    }
    with pytest.raises(UsageError, match="is a object"):
        engine_value(object())


def test_help_is_made_of_the_parsers() -> None:
    text = detllm_help()
    for verb in VERBS:
        assert f"%detllm {verb}" in text
    for option in setup_parser().option_strings:
        assert option in text
    for option in detgen_parser().option_strings:
        assert option in detgen_help()
    assert text.count("::\n") >= 3
    assert detgen_help().count("::\n") >= 3


def test_examples_in_the_help_parse() -> None:
    lines = [line.strip() for line in (detllm_help() + detgen_help()).splitlines()]
    examples = [line for line in lines if line.startswith("%") and "[" not in line]
    cells = [line for line in examples if line.startswith("%%detgen ")]
    assert len(cells) == 4
    for line in cells:
        detgen(line.removeprefix("%%detgen "))
    use("demo --max-model-len 4096")
    assert "%detllm use demo --max-model-len 4096" in examples


def test_nearest_is_none_when_nothing_is_like_it() -> None:
    assert nearest("zzzz", ["status", "use"]) is None
    assert nearest("staus", ["status", "use"]) == "status"
    options = [name for name in detgen_parser().option_strings if name.startswith("--")]
    assert nearest("--temp", options) == "--temperature"
    assert nearest("--max", options) == "--max-tokens"
    assert nearest("--t", ["--text"]) == "--text"  # by likeness
    assert nearest("-", ["--text", "--top-p"]) is None
