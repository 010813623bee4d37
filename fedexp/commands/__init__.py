"""The command lines. Nothing imports them."""
