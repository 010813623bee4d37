"""The ``fedexp`` command as ``python -m fedexp``."""

from fedexp.commands.run import main

main()
