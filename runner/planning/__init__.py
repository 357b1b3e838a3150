"""What a job would need, before it runs: traced on fake tensors, extrapolated, put in words."""
