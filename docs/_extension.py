"""What this site adds to Sphinx: two directives that are written by the code, and links to files outside the site.

``{settings}`` and ``{commands}`` describe the settings and the command line as they are, so that no page goes stale.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

from jaxhetero import cli, config


class Settings(SphinxDirective):
    """Every field of a dataclass of ``jaxhetero.config``, with its variable, type, default and description."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Markdown, parsed as a part of the page."""
        return self.parse_text_to_nodes("\n".join(describe_settings(self.arguments[0])))


class Commands(SphinxDirective):
    """Every command of ``jaxhetero``, with its usage, description and options."""

    def run(self) -> list[nodes.Node]:
        """Markdown, parsed as a part of the page."""
        return self.parse_text_to_nodes("\n".join(describe_commands()), allow_section_headings=True)


def describe_settings(class_name: str) -> Iterator[str]:
    """A definition list in Markdown."""
    descriptions = ModuleAnalyzer.for_module("jaxhetero.config").find_attr_docs()
    for setting in dataclasses.fields(getattr(config, class_name)):
        # A field of ReducerConfig that says nothing means what it means in Config.
        lines = descriptions.get((class_name, setting.name)) or descriptions.get(("Config", setting.name)) or []
        known = setting.name in config.Config.__dataclass_fields__
        variable = f"`{config.ENV_PREFIX}{setting.name.upper()}`, " if known else ""
        default = f"default `{setting.default}`" if setting.default != "" else "empty by default"
        yield f"`{setting.name}`\n: {variable}{setting.type}, {default}\n"
        yield "  " + " ".join(lines).strip() + "\n"


def describe_commands() -> Iterator[str]:
    """A section in Markdown for each command: how it is called, what it does, a definition list of its options."""
    parent = click.Context(cli.commands, info_name="jaxhetero", **cli.commands.context_settings)
    for name, command in sorted(cli.commands.commands.items()):
        context = click.Context(command, info_name=name, parent=parent)
        usage = command.get_usage(context).removeprefix("Usage: ")
        yield f"## jaxhetero {name}\n\n```\n{' '.join(usage.split())}\n```\n"
        yield _escape(inspect.cleandoc(command.help or "")) + "\n"
        for option in command.get_params(context):
            if record := option.get_help_record(context):
                yield f"`{record[0]}`\n: {_escape(record[1])}\n"


def _escape(text: str) -> str:
    """Text of a terminal as Markdown: stars and dollars stand for themselves."""
    return re.sub(r"([*$_\[\]])", r"\\\1", text)


# [text](../path#fragment), but no image.
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\.?/[^)#\s]+)(?:#[^)\s]*)?\)")


def name_files(app: Sphinx, page: str, source: list[str]) -> None:
    """In place of a link to a file of the repository that is no page of the site: its path."""
    folder = (Path(app.srcdir) / page).parent

    def replace(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(app.srcdir):
            return link[0]
        path = target.relative_to(Path(app.srcdir).parent)
        return f"`{path}`" if link[1].strip("`") == str(path) else f"{link[1]} (`{path}`)"

    source[0] = _LINK.sub(replace, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("settings", Settings)
    app.add_directive("commands", Commands)
    app.connect("source-read", name_files)
    return {"parallel_read_safe": True}
