"""A run's outcome: what is known of it, put into its record part by part."""
