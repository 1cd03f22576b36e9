"""Writes the traceback of a bug to a file."""

import tempfile
import time
import traceback
from pathlib import Path

import unirl
from unirl.config.failures import Session


def save_crash(error: BaseException, session: Session) -> Path | None:
    """Writes the traceback into the run, working or temporary directory. Returns the file, or None if all fail."""
    name = f"unirl-crash-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    text = f"unirl {unirl.__version__}  {' '.join(session.argv)}\n\n{''.join(traceback.format_exception(error))}"
    for folder in (session.run_dir, Path.cwd(), Path(tempfile.gettempdir())):
        try:
            if folder is not None:
                (folder / name).write_text(text, encoding="utf-8")
                return folder / name
        except OSError:
            continue  # The folder is not writable or full: try the next one.
    return None
