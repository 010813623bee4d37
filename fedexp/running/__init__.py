"""A run's life: from a resolved config to a stored result."""
