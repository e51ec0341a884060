"""What the commands share."""

from __future__ import annotations

import click
from click.core import ParameterSource

first_option = click.option(
    "--from",
    "first",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="The first seed.",
)


def refuse_beside(context: click.Context, option: str, *names: str) -> None:
    """Raise UsageError if one of these parameters was given: beside `option` it means nothing."""
    for parameter in context.command.params:
        if (
            parameter.name in names
            and context.get_parameter_source(parameter.name) is not ParameterSource.DEFAULT
        ):
            raise click.UsageError(f"{parameter.opts[0]} does not go with {option}.")
