"""Prints the sizes of all models beside the published ones: ``python -m benchmarks.models``."""

from __future__ import annotations

from . import MODELS, PaperModel

COLUMNS = ("model", "layers", "published", "ours, rounded", "ours", "remark")


def row(model: PaperModel) -> tuple[str, ...]:
    """One line of the table."""
    built = model.on_meta()
    count = model.count(built)
    remarks = []
    if model.difference:
        percent = 100 * (count / model.published_count - 1)
        remarks.append(f"{percent:+.1f} %: {model.difference}")
    if model.extra:
        remarks.append(f"rounded without the {model.extra:,} that ours has on purpose")
    return (
        model.name,
        str(len(built)),
        model.published,
        model.as_published(count),
        f"{count:,}",
        "; ".join(remarks),
    )


def main() -> None:
    """Prints the table."""
    rows = [COLUMNS, *map(row, MODELS)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *numbers, remark in rows:
        right = [cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True)]
        print("  ".join([name.ljust(widths[0]), *right, remark]).rstrip())


if __name__ == "__main__":
    main()
