"""`isojax bench engine`: a stock vLLM engine and ours, same weights, prompts and sizes."""
