"""vLLM inside this process."""
