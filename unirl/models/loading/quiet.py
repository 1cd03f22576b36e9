"""Libraries that load models, without their progress bars and remarks: the console belongs to the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """diffusers and transformers draw no bars and log errors only inside; as before afterwards."""
    import diffusers.utils.logging as of_diffusers
    import transformers.utils.logging as of_transformers

    libraries = (of_diffusers, of_transformers)
    before = [(library, library.get_verbosity(), library.is_progress_bar_enabled()) for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, verbosity, bars in before:
            library.set_verbosity(verbosity)
            if bars:
                library.enable_progress_bar()
