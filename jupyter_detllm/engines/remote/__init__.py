"""A `vllm serve` in another process, spoken to over HTTP."""
