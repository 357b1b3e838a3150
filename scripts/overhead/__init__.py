"""What `scripts.benchmark` is made of: contestants, their processes, figures."""
