"""Measurement: clock, memory account, work, evidence."""
