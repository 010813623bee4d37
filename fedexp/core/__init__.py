"""The interfaces of fedexp's parts, the values that they exchange, and the runner.

The step kernel, which trains one client, is here, too. This package imports nothing
from the other packages of fedexp. Implementations of the interfaces belong to those
packages.
"""
