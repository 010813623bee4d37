"""``python -m fedexp`` is the ``fedexp`` command."""

from fedexp.commands.run import main

main()
