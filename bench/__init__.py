"""Scripts that measure what the README claims."""
