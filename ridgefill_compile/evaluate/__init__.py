"""Measures, texts, intervals and pictures."""
