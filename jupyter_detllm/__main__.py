"""``python -m jupyter_detllm``: the same as ``jupyter detllm``."""

from __future__ import annotations

import sys

from jupyter_detllm.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
