"""The command's one application, and the options that its verbs share."""

from typing import Annotated, Final

import typer

from .cli_exit import MEANINGS
from .layout import DEFAULT_ROOT, ROOT_VARIABLE

_HELP: Final = """Look after a store of LLM prompt caches.

\b
Examples:
  blockstore stats                     how much is stored, shared and free
  blockstore ls --limit 10             the entries used last
  blockstore show 3f2a                 one entry, by the first digits of its id
  blockstore show ./chat.mlxkv         any cache file, in a store or not
  blockstore rm 3f2a 91bc              remove entries ...
  blockstore gc                        ... and give their space back
  blockstore limits --max-bytes 200G   what the store may take
  blockstore check --deep              read everything and compare
  blockstore import ~/old-caches       take cache files of any version in
  blockstore export 3f2a out/          write an entry as a file again
  blockstore --root /data/kv gc --dry-run --json
"""
_EPILOG: Final = "\b\nExit codes:\n" + "\n".join(f"  {code.value:<4} {text}" for code, text in MEANINGS.items())
_ROOT_HELP: Final = f"The store's directory. [${ROOT_VARIABLE}, else {DEFAULT_ROOT}]"
_JSON_HELP: Final = "Print JSON, errors too."

Root = Annotated[str | None, typer.Option("--root", metavar="DIR", help=_ROOT_HELP, show_default=False)]
Json = Annotated[bool, typer.Option("--json", help=_JSON_HELP)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; print what would be done.")]

app = typer.Typer(
    name="blockstore",
    help=_HELP,
    epilog=_EPILOG,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
