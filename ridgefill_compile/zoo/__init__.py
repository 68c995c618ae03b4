"""Every causal language model of transformers at toy size, and what a fill of each one must equal."""
