"""The module that makes ``python -m fedexp`` run the ``fedexp`` command."""

from fedexp.commands.run import main

main()
