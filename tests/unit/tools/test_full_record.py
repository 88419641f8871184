"""What the record of a whole run says, and that it is written stage by stage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tools import full_record, simulated, stages

BEFORE = os.environ.get("ONEDNN_MAX_CPU_ISA")

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="one"/>
<testcase classname="a" name="two"><failure>no</failure></testcase>
<testcase classname="a" name="three"><error>no</error></testcase>
<testcase classname="a" name="four"><skipped/></testcase>
</testsuite></testsuites>"""


def test_failures_errors_and_skips_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    found = full_record.counts(path)
    assert found == {"passed": 1, "skipped": 1, "failed": ["a::three", "a::two"]}


def test_a_stage_without_a_report_was_not_run(tmp_path: Path) -> None:
    assert full_record.counts(tmp_path / "none.xml") == {"not run": True}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(full_record, "RESULT", tmp_path / "full.json")
    monkeypatch.setattr(full_record, "SIMULATED", tmp_path / "simulated.json")
    monkeypatch.setattr(full_record, "_REPORTS", tmp_path / "reports")
    monkeypatch.setattr(full_record, "_PACKAGES", ("pytest",))
    return tmp_path


def code(text: str) -> tuple[str, str]:
    return "-c", text


COPY = f"import pathlib, sys; pathlib.Path(sys.argv[1][11:]).write_text({REPORT!r}); exit(1)"


def test_every_stage_is_run_and_kept_when_it_ends(results: Path) -> None:
    chosen = [
        stages.Stage("lint", code("exit(3)")),
        stages.Stage("tests of it", code(COPY)),
        stages.Stage("the last", code("")),
    ]
    assert stages.run_stages(chosen, record=full_record.Record("make test-full")) == 3
    found = json.loads((results / "full.json").read_text())
    assert [(stage["stage"], stage["exit_code"]) for stage in found["stages"]] == [
        ("lint", 3),
        ("tests of it", 1),
        ("the last", 0),
    ]
    assert found["stages"][1]["failed"] == found["failed"] == ["a::three", "a::two"]
    assert (found["outcome"], found["passed"], found["skipped"]) == ("failed", 1, 1)
    assert found["commit"]
    assert not (results / "simulated.json").exists()


def test_what_failed_is_named_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    good, bad = stages.Stage("good", code("")), stages.Stage("bad", code("exit(2)"))
    tests = stages.Stage("tests", code("print('9 passed')"))
    assert stages.run_stages([bad, good, tests]) == 2
    assert capfd.readouterr().out.splitlines()[-2:] == ["9 passed", "failed: bad"]
    assert stages.run_stages([good, tests]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "9 passed"


def test_only_a_whole_run_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        stages, "run_stages", lambda chosen, record: seen.append(record is not None) or 0
    )
    stages.main(["lint"])
    stages.main(["lint", "full"])
    stages.main(["--as", "AVX2", "lint"])
    stages.main(["--as", "AVX2"])
    stages.main(["--as", "AVX2", *stages.MAKE_TEST])
    assert seen == [False, True, False, True, True]


def test_make_runs_what_a_simulated_run_does() -> None:
    text = (stages.ROOT / "Makefile").read_text()
    assert f"\ntest: setup\n\t@$(STAGES) {' '.join(stages.MAKE_TEST)}\n" in text


SHOW = "import os; print(os.environ.get('ONEDNN_MAX_CPU_ISA'), os.environ['ATEN_CPU_CAPABILITY'])"


def test_each_kind_has_its_variables_and_an_entry(
    results: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages, "lacking", lambda kind: ())
    monkeypatch.setattr(stages, "MAKE_TEST", ("show",))
    monkeypatch.setattr(stages, "STAGES", {"show": (stages.Stage("show", code(SHOW)),)})
    assert stages.main(["--as", "AVX2"]) == 0
    first = json.loads((results / "simulated.json").read_text())["kinds"]
    assert stages.main(["--as", "all"]) == 0
    kinds = json.loads((results / "simulated.json").read_text())["kinds"]
    assert list(first) == ["AVX2"]
    assert set(kinds) == set(simulated.KINDS)
    out = capfd.readouterr().out
    for line in ("AVX2 avx2", "AVX512_CORE avx512", "AVX512_CORE_BF16 avx512"):
        assert f"\n{line}\n" in out
    assert kinds["AVX2"]["settings"] == {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    }
    assert kinds["AVX2"]["outcome"] == "passed"
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == BEFORE


def test_the_exit_code_is_that_of_the_kind_that_failed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fails = "import os; exit(os.environ['ONEDNN_MAX_CPU_ISA'] == 'AVX512_CORE')"
    monkeypatch.setattr(stages, "lacking", lambda kind: ())
    monkeypatch.setattr(stages, "STAGES", {"lint": (stages.Stage("gate", code(fails)),)})
    assert stages.main(["--as", "all", "lint"]) == 1
    last = [line.split(",")[0] for line in capfd.readouterr().out.splitlines()[-3:]]
    assert last == ["AVX2: ok", "AVX512_CORE: FAILED (exit code 1)", "AVX512_CORE_BF16: ok"]


def test_a_kind_that_this_processor_is_not_is_not_run(
    results: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages, "lacking", lambda kind: ("avx512_bf16",))
    assert stages.main(["--as", "AVX512_CORE_BF16"]) == 0
    assert "not run, for this processor has no avx512_bf16" in capfd.readouterr().out
    assert not (results / "simulated.json").exists()
    chosen = [stages.Stage("gate", code("exit(1)"), "AVX512_CORE_BF16")]
    assert stages.run_stages(chosen, record=full_record.Record("make test-full")) == 0
    found = json.loads((results / "full.json").read_text())
    assert found["outcome"] == "not run"
    assert found["stages"] == [{"stage": "gate", "lacks": "avx512_bf16"}]


def test_what_a_kind_needs() -> None:
    older = {"avx2", "fma", "sse4_2"}
    assert simulated.lacking("AVX2", older) == ()
    assert simulated.lacking("AVX512_CORE", older) == (
        "avx512bw",
        "avx512dq",
        "avx512f",
        "avx512vl",
    )
    newer = older | {"avx512bw", "avx512dq", "avx512f", "avx512vl"}
    assert simulated.lacking("AVX512_CORE", newer) == ()
    assert simulated.lacking("AVX512_CORE_BF16", newer) == ("avx512_bf16",)
    assert simulated.lacking("AVX512_CORE_BF16", newer | {"avx512_bf16"}) == ()
