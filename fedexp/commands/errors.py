"""How a command ends: exit codes, and errors of the user's without a traceback."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

from fedexp.core.errors import FedexpError
from fedexp.tracking.outlet import lasting_output

USAGE_ERROR, JOB_ERROR = 2, 1


def guarded(work: Callable[[], int]) -> int:
    """Run `work`; its exit code, or that of an error of the user's, which is told."""
    with lasting_output():
        try:
            return work()
        except FedexpError as error:
            tell(error)
            return USAGE_ERROR
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 128 + signal.SIGINT
        except Exception as error:
            from fedexp.core import users_code
            from fedexp.storage.files import refused

            if (told := refused(error) or users_code.told(error)) is None:
                raise
            told.__cause__ = error
            tell(told)
            return JOB_ERROR


def tell(error: FedexpError) -> None:
    """Print it plainly, unless HYDRA_FULL_ERROR=1 asks for the traceback."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    else:
        print(f"error: {error}", file=sys.stderr)
