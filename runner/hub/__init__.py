"""Decoders of the `transformers` library behind the project's own contract."""
