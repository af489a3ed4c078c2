"""Adds the place in the pipeline to an exception, as a note."""


def annotate(error: BaseException, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
