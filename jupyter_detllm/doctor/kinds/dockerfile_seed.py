"""A container file that seeds while it is built: nothing of that is left when it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.scene import Scene

__all__ = ["look"]

_SEEDS = re.compile(
    r"manual_seed|random\.seed|set_seed|seed_everything|use_deterministic_algorithms"
    r"|(?:export|set)\s+(?P<name>PYTHONHASHSEED|OMP_NUM_THREADS|CUBLAS_WORKSPACE_CONFIG|VLLM_\w+)"
    r"=(?P<value>[\w:.]+)"
)


def look(scene: Scene) -> Look:
    """Return RUN instructions that seed or set a control."""
    if not scene.dockerfiles:
        return None
    found = []
    for path, text in scene.dockerfiles.items():
        for line, instruction in _runs(text):
            seeds = _SEEDS.search(instruction)
            if seeds is None:
                continue
            evidence = f"RUN {seeds[0]} holds while the image is built, and not when it runs"
            name, value = seeds["name"], seeds["value"]
            mend = (
                f"ENV {name}={value}" if name else "%detllm --seed 0 in the notebook's first cell"
            )
            found.append(Finding(Severity.WRONG, evidence, mend, f"{path.name}, line {line}"))
    return found


def _runs(text: str) -> Iterator[tuple[int, str]]:
    """Yield each RUN instruction with the line it begins in."""
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        start, whole = index, lines[index]
        while whole.rstrip().endswith("\\") and index + 1 < len(lines):
            index += 1
            whole = f"{whole.rstrip()[:-1]} {lines[index]}"
        index += 1
        if re.match(r"\s*RUN\s", whole, re.IGNORECASE):
            yield start + 1, whole
