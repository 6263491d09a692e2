"""Brings the notebooks into the form that is stored: no outputs, no counts, no metadata of editors, cells numbered.

    python notebooks/clean.py            # rewrites those that are not in it
    python notebooks/clean.py --check    # names them and fails
"""
import argparse
import sys
from pathlib import Path

import nbformat

FOLDER = Path(__file__).parent
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}, "language_info": {"name": "python"}}


def stored_form(notebook: nbformat.NotebookNode) -> str:
    """The text of the .ipynb file: cells' types and sources, and ids by position, so that a difference in review is one of content."""
    make = {"code": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell}
    cells = [make[cell.cell_type](cell.source, id=f"cell-{number:02d}") for number, cell in enumerate(notebook.cells)]
    return nbformat.writes(nbformat.v4.new_notebook(cells=cells, metadata=METADATA)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a notebook is not in its stored form")
    check = parser.parse_args().check
    changed = []
    for path in sorted(FOLDER.glob("*.ipynb")):
        text = stored_form(nbformat.read(path, as_version=4))
        if text != path.read_text(encoding="utf-8"):
            changed.append(path.name)
            if not check:
                path.write_text(text, encoding="utf-8")
    if changed and check:
        sys.exit(f"not in the stored form: {', '.join(changed)}; run: python notebooks/clean.py")
    print("rewritten:" if changed else "nothing to do", *changed)


if __name__ == "__main__":
    main()
