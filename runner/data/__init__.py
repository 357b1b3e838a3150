"""Corpora, their order, and how examples become micro-batches."""
