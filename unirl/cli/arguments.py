"""Parses the command line: options of a command, and recipe settings in several common spellings."""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from unirl.config.errors import ArgumentError, UsageError, did_you_mean
from unirl.types.secrets import redact_setting


class Parser(argparse.ArgumentParser):
    """An argparse parser that prints examples first and raises UsageError instead of ending the process."""

    def __init__(self, command: str, description: str, examples: Sequence[str]) -> None:
        super().__init__(prog=f"unirl {command}", description=description, allow_abbrev=False)
        self.examples = examples
        self.takes_value: dict[str, bool] = {"-h": False, "--help": False}

    def option(self, *names: str, **settings: Any) -> None:
        """`add_argument` for an option. Its names are recorded, to tell options from recipe settings."""
        self.add_argument(*names, **settings)
        self.takes_value |= dict.fromkeys(names, settings.get("action") != "store_true")

    def format_help(self) -> str:
        return "examples:\n" + "".join(f"  {line}\n" for line in self.examples) + "\n" + super().format_help()

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{self.prog}: {message}. See {self.prog} -h")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The options and positionals of a command. Settings of a recipe are taken out before."""
        parsed, unknown = self.parse_known_args(list(argv))
        if unknown:
            shown = redact_setting(unknown[0])
            hint = did_you_mean(unknown[0], self.takes_value)
            if not hint and self.epilog == SETTINGS_HELP and not unknown[0].startswith("-"):
                hint = f" A setting is {shown}=VALUE."
            raise ArgumentError(f"{self.prog}: unknown argument '{shown}'.{hint} See {self.prog} -h")
        return parsed


SHORTHANDS: Mapping[str, str] = {
    "--resume": "resume",
    "--name": "run.name",
    "--project": "run.project",
    "--out": "run.dir",
    "--seed": "sampling.seed",
    "--max-steps": "num_rollouts",
}
"""Options that set a recipe key under a shorter name."""

SETTINGS_HELP = """\
settings:
  a.b=1   --a.b 1   --a.b=1        set a key of the recipe (lists: a.b=[1,2])
  +a.b=1  ++a.b=1  ~a.b            Hydra's spellings; ~ removes a key
  scale=toy                        run the recipe with small values, on a CPU, in seconds
  --resume auto|latest|none|PATH   --name N   --project P   --out DIR   --seed N   --max-steps N
"""


@dataclass(frozen=True)
class RecipeArguments:
    """The arguments of a command that works on one recipe, as typed."""

    recipe: str
    overrides: tuple[str, ...]  # "key=value", "~key"
    options: argparse.Namespace


def recipe_parser(command: str, description: str, examples: Sequence[str]) -> Parser:
    """A parser for `unirl <command> RECIPE [key=value ...]`, which also accepts Hydra's --config-name."""
    parser = Parser(command, description, examples)
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a name listed by `unirl recipes`, or a YAML file")
    parser.option("--config-name", "-cn", metavar="RECIPE", help="the recipe, in Hydra's spelling")
    parser.epilog = SETTINGS_HELP
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = f"unirl {command} RECIPE [key=value ...] [options]"
    return parser


def parse_recipe(parser: Parser, argv: Sequence[str], default: str | None = None) -> RecipeArguments:
    """The recipe (`default` if none is named), its settings, and the options of the command."""
    own, overrides = split_settings(argv, parser.takes_value)
    options = parser.parse(own)
    named = [name for name in (options.recipe, options.config_name) if name]
    if len(named) == 2:
        raise ArgumentError(f"{parser.prog}: two recipes are named, '{named[0]}' and '{named[1]}'; name one")
    if not named and default is None:
        raise UsageError(f"{parser.prog}: name a recipe. They are listed by `unirl recipes`")
    return RecipeArguments((*named, default or "")[0], tuple(overrides), options)


def split_settings(argv: Sequence[str], options: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Separates the arguments of the command from the settings, which become `key=value` or `~key`.

    Args:
        options: option of the command to True if it takes a value.
    """
    own: list[str] = []
    settings: list[str] = []
    words = iter(argv)
    for word in words:
        name, has_value, value = word.partition("=")
        if name in options:
            own.append(word)
            own += [_value_after(word, words)] if options[name] and not has_value else []
        elif name.startswith("--"):
            settings.append(_setting(name, value if has_value else _value_after(word, words)))
        elif word.startswith("~") or has_value:
            settings.append(word)
        else:
            own.append(word)
    return own, settings


def _setting(option: str, value: str) -> str:
    """`key=value` in Hydra's grammar. The value of a shorthand is quoted here if necessary."""
    if option not in SHORTHANDS:
        return f"{option[2:].replace('-', '_')}={value}"
    plain = all(letter.isalnum() or letter in "_-./+:" for letter in value)
    quoted = value.replace('"', r"\"")
    return f"{SHORTHANDS[option]}={value}" if plain else f'{SHORTHANDS[option]}="{quoted}"'


def _value_after(option: str, words: Iterator[str]) -> str:
    value = next(words, None)
    if value is None:
        raise ArgumentError(f"{option} needs a value: {option} VALUE, or {option}=VALUE")
    return value


def run_verb(
    noun: str, argv: Sequence[str], verbs: Mapping[str, Callable[[Sequence[str]], int]], examples: Sequence[str]
) -> int:
    """Runs `unirl <noun> <verb> ...`. Without a verb, the first one runs."""
    if argv and argv[0] in ("-h", "--help"):
        shown = "".join(f"  {line}\n" for line in examples)
        print(f"examples:\n{shown}\nusage: unirl {noun} {{{','.join(verbs)}}} ... (add -h after a verb for details)")
        return 0
    default = next(iter(verbs))
    verb, *rest = argv if argv and not argv[0].startswith("-") else (default, *argv)
    if verb not in verbs:
        raise ArgumentError(
            f"unirl {noun}: unknown verb '{verb}'.{did_you_mean(verb, verbs)} Verbs: {', '.join(verbs)}"
        )
    return verbs[verb](rest)


def output_folder(path: str, kind: str, out: str | None) -> Path:
    """The folder for the files that a command makes of a run or checkpoint: `out`, else a new one in `<run>/<kind>`."""
    if out is not None:
        return Path(out)
    folder = Path(path).resolve()
    inside = folder.parent.name == "checkpoints"
    root, name = (folder.parent.parent, folder.name) if inside else (folder, "latest")
    return root / kind / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
