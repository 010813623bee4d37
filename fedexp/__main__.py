"""``python -m fedexp`` is the ``fedexp`` command."""

from fedexp.cli import main

main()
