"""Tables as the commands print them."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_LEAST_WIDTH = 100


def rendered(tables: list[Table]) -> str:
    """Return tables as text: as wide as the terminal, or at least 100 columns, without trailing blanks."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, _LEAST_WIDTH))
    with console.capture() as captured:
        console.print(*tables)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def new_table(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Begin a table; the columns of numbers are aligned to the right."""
    made = Table(title=_title(title), title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        made.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    return made


def facts_table(title: str, values: dict[str, object]) -> Table:
    """Return a table of names and values."""
    made = Table(title=_title(title), title_justify="left", box=box.SIMPLE, show_header=False)
    for name, value in values.items():
        made.add_row(name, str(value))
    return made


def _title(title: str) -> Text:
    """Return a title of one line, above a narrower table as well."""
    return Text(title, style="table.title", no_wrap=True, overflow="ignore")
