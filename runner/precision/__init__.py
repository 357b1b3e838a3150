"""Precision recipes, one small module each."""
