"""What a job would need, known before it runs: traced on fake tensors, extrapolated, put in words."""
