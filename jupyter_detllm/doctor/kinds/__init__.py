"""The kinds of finding, one module each; the table is `jupyter_detllm.doctor.table`."""

__all__: list[str] = []
