"""The command lines. No other package imports them."""
