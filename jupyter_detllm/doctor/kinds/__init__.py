"""The kinds of finding, by what they look at; the table is `jupyter_detllm.doctor.table`."""

__all__: list[str] = []
