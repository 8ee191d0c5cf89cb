"""What people see: text of servers and paths is printed as it is, colours only where we put them."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.text import Text

from gym_ckpt_grpc.cli.output import say, table


def printed(value: object) -> str:
    console = Console(file=StringIO(), width=120)
    console.print(value)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_brackets_in_a_cell_are_not_taken_for_a_style() -> None:
    """An error ends in `[kind/service/0]`; a verdict is a styled cell."""
    text = printed(table("", ["a", "b"], [[Text("holds", style="green"), "refused [resources/counter/0]"]]))
    assert "refused [resources/counter/0]" in text
    assert "holds" in text
    assert "[green]" not in text


def test_a_said_line_keeps_its_text() -> None:
    """Whatever the message has in it."""
    console = Console(file=StringIO(), width=40)
    say(console, "red", "error:", "no [bold]such[/bold] thing [agent/agent/0] " + "x" * 60)
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue() == "error: no [bold]such[/bold] thing [agent/agent/0] " + "x" * 60 + "\n"
