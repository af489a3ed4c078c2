"""Adds the place in the pipeline to an exception, as a note."""


def annotate(error: BaseException, note: str) -> None:
    """Adds a note to an exception, once."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
