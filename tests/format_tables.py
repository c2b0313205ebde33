"""The tables of docs/formats.md, made from the tables that the loader uses. `python tests/format_tables.py` writes them again."""

from pathlib import Path

from dflash_jax.hf_layouts import ANY, FIELDS, LAYOUTS, ONLY_VALUES, RELATIVES, RENAMED_TENSORS, REQUIRED, UNUSED_TENSORS, Derived

FILE = Path(__file__).parents[1] / "docs" / "formats.md"
BEGIN, END = "<!-- made by tests/format_tables.py, from dflash_jax/hf_layouts.py -->\n", "<!-- end -->\n"


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def homes(field, layout):
    written = field.homes(layout, written=True)
    return ", ".join(f"`{home}`{'' if home in written or layout == 'assistant' else '*'}" for home in field.homes(layout)) or "-"


def absent(field):
    if field.absent is ANY:
        return "see right"
    if field.absent is REQUIRED:
        return "refused" + ("; the target's in the other two layouts" if field.target else "")
    if isinstance(field.absent, Derived):
        return field.absent.text
    return {"()": "none", "None": "none", "False": "no"}.get(repr(field.absent), repr(field.absent))


def tables():
    fields = [[f"`{field.name}`", *(homes(field, layout) for layout in LAYOUTS), absent(field), field.meaning] for field in FIELDS]
    titles = [layout.title for layout in LAYOUTS.values()]
    tensors = [[f"`{theirs}`", f"`{ours}`"] for theirs, ours in RENAMED_TENSORS.items()]
    tensors += [[f"`{name}`", "left out"] for name in UNUSED_TENSORS]
    only = [[f"`{name}`", f"`{value!r}`"] for name, value in ONLY_VALUES.items()]
    relatives = [[kind, ", ".join(f"`{word}`" for word in words)] for kind, words in RELATIVES.items()]
    return "\n".join(
        [
            table(["ours", *titles, "absent", "meaning"], fields),
            table(["tensor", "read as"], tensors),
            table(["field", "only value"], only),
            table(["refused by name", "known by"], relatives),
        ]
    )


def page():
    """The whole page, with its tables made anew."""
    before, rest = FILE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + "\n" + tables() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
