"""Recurrences as single operators: one node a scan, whatever the length, which can leave outputs out."""
