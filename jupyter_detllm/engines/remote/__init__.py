"""Client engine for a `vllm serve` in another process, over HTTP."""
