"""Graph rewrites and their analyses, one a file."""
