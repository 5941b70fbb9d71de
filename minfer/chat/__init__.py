"""Conversations with a model, kept in files that resume without prefill (contract 9.1, 9.2)."""
