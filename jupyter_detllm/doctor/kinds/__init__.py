"""The kinds of finding, by subject; the table is in `jupyter_detllm.doctor.table`."""

__all__: list[str] = []
