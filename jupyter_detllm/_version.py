"""The version, importable without anything else."""

__all__ = ["__version__"]

__version__ = "0.1.0"
