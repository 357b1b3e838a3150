"""Memory levers, one small module each."""
