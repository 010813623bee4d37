"""How the gradients of stacked clients are computed."""
