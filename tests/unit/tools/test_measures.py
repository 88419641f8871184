"""The tool that measures the package's shape."""

from __future__ import annotations

from tools.measures import circles, package_imports


def test_a_circle_of_modules_is_found() -> None:
    imports = {"p.a.x": {"p.a.y"}, "p.a.y": {"p.a.z"}, "p.a.z": {"p.a.x"}, "p.a.w": {"p.a.x"}}
    assert circles(imports) == [("p.a.x", "p.a.y", "p.a.z")]


def test_a_circle_of_folders_is_found_where_no_module_is_in_one() -> None:
    imports: dict[str, set[str]] = {
        "p.a.x": {"p.b.x"},
        "p.b.x": set(),
        "p.b.y": {"p.a.y"},
        "p.a.y": set(),
    }
    assert circles(imports) == [("p.a", "p.b")]


def test_what_goes_one_way_is_no_circle() -> None:
    imports: dict[str, set[str]] = {"p.a.x": {"p.a.y", "p.b"}, "p.a.y": {"p.b"}, "p.b": set()}
    assert circles(imports) == []


def test_the_package_has_none() -> None:
    imports = package_imports()
    assert len(imports) > 100
    assert (
        "jupyter_detllm.core.stamp"
        in imports["jupyter_detllm.core.verdict"] | imports["jupyter_detllm.core.notebook"]
    )
    assert circles(imports) == []
