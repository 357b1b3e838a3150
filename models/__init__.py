"""Architectures: specs that are checked without torch, and the networks they build."""
