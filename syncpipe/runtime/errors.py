"""Says where in the pipeline an exception came from, without changing the exception."""


def annotate(error: BaseException, note: str) -> None:
    """Adds a note to an exception, once."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
