"""``oars completion`` and ``oars man``: what the parsers know, in the languages of shells and of ``man``.

The verbs and their options are read from the parsers, so that nothing is listed a second time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import NamedTuple

from oars import __version__
from oars.arguments import Parser
from oars.runfolder import RUNS

BASH = """\
# Completion for oars, printed by: oars completion {shell}
_oars() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} verb=${{COMP_WORDS[1]}} at=2
    local flags="" valued="" offer="" script="" i
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{verbs}" -- "$cur"))
        return
    fi
    if [ "$verb" = data ]; then
        if [ "$COMP_CWORD" -eq 2 ]; then
            COMPREPLY=($(compgen -W "{data}" -- "$cur"))
            return
        fi
        verb="data ${{COMP_WORDS[2]}}" at=3
    fi
    case $verb in
{cases}
    esac
    for ((i = at; i < COMP_CWORD; i++)); do
        case "${{COMP_WORDS[i]}}" in
            -*) case " $valued " in *" ${{COMP_WORDS[i]}} "*) i=$((i + 1));; esac;;
            *) [ -n "$script" ] && return;;
        esac
    done
    case "$verb $prev" in
{values}
        *) case " $valued " in *" $prev "*) return;; esac
           case $cur in -*) offer=$flags;; esac;;
    esac
    COMPREPLY=($(compgen -W "$offer" -- "$cur"))
}}
complete -o default -F _oars oars
"""
ZSH = "#compdef oars\nautoload -U +X bashcompinit && bashcompinit\n"
FISH = """\
# Completion for oars, printed by: oars completion fish
function __oars_at  # are these words, a verb, what stands before the cursor, and no script yet?
    set -l given (commandline -opc)
    set -l verb (string split ' ' -- $argv[1])
    test "$given[2..]" = "$argv[1]"; and return 0
    test (count $given) -gt (count $verb); or return 1
    test "$given[2..$(math (count $verb) + 1)]" = "$argv[1]"; or return 1
    contains -- $argv[1] $__oars_scripts; or return 0
    set -l skip 0
    for word in $given[(math (count $verb) + 2)..]
        if test $skip = 1
            set skip 0
        else if contains -- $word $__oars_valued
            set skip 1
        else if not string match -q -- '-*' $word
            return 1
        end
    end
end
set -g __oars_scripts {scripts}
set -g __oars_valued {valued}
"""


class Option(NamedTuple):
    """One option of a verb, or one of its arguments (no names)."""

    names: list[str]
    takes: str  # what its value is called; nothing: it has none
    choices: list[str]
    help: str


def completion(shell: str, parsers: Mapping[str, Parser]) -> str:
    """The completion script of a shell."""
    verbs = {name: options_of(parser) for name, parser in parsers.items() if name}
    if shell == "fish":
        return _fish(parsers, verbs)
    cases, values = [], []
    for verb, options in verbs.items():
        named = [option for option in options if option.names]
        plain = [option.choices for option in options if not option.names and option.choices]
        settings = [f'flags="{" ".join(name for option in named for name in option.names)}"',
                    f'valued="{" ".join(name for option in named if option.takes for name in option.names)}"',
                    *(f'offer="{" ".join(choices)}"' for choices in plain),
                    # The shell runs what looks like a command in a name: only plain names are offered.
                    *(["offer=$(ls " + RUNS + " 2>/dev/null | LC_ALL=C grep -xE '[A-Za-z0-9._-]+')"]
                      if _takes_runs(options) else []),
                    *(["script=1"] if _takes_script(parsers[verb]) else [])]
        cases.append(f'        "{verb}") {"; ".join(settings)};;')
        values += [f'        "{verb} {name}") offer="{" ".join(option.choices)}";;'
                   for option in named if option.choices for name in option.names]
    text = BASH.format(shell=shell, verbs=_top(verbs), data=_inner(verbs), cases="\n".join(cases),
                       values="\n".join(values))
    return (ZSH if shell == "zsh" else "") + text


def _fish(parsers: Mapping[str, Parser], verbs: Mapping[str, list[Option]]) -> str:
    valued = {name for options in verbs.values() for option in options if option.takes for name in option.names}
    lines = [FISH.format(scripts=" ".join(f"'{verb}'" for verb in verbs if _takes_script(parsers[verb])),
                         valued=" ".join(sorted(valued)))]
    for verb, options in verbs.items():
        outer, _, word = verb.rpartition(" ")
        at = f"__fish_seen_subcommand_from {outer}; and not __fish_seen_subcommand_from {_inner(verbs)}" if outer else \
            "__fish_use_subcommand"
        lines.append(f"complete -c oars -f -n '{at}' -a {word} -d {_quoted(parsers[verb].description or '')}")
        for option in options:
            words = _quoted(" ".join(option.choices))
            if option.names:
                names = " ".join(f"-{'l' if name[1] == '-' else 's'} {name.lstrip('-')}" for name in option.names)
                value = f" -x -a {words}" if option.choices else " -r" if option.takes else ""
                lines.append(f"complete -c oars -n '__oars_at \"{verb}\"' {names}{value} -d {_quoted(option.help)}")
            elif option.choices:
                lines.append(f"complete -c oars -f -n '__oars_at \"{verb}\"' -a {words}")
        if _takes_runs(options):
            lines.append(f"complete -c oars -f -n '__oars_at \"{verb}\"' -a '(ls {RUNS} 2>/dev/null)'")
    return "\n".join(lines) + "\n"


def man(parsers: Mapping[str, Parser]) -> str:
    """The manual page, in roff."""
    top = parsers[""]
    day = time.strftime("%Y-%m-%d", time.gmtime())
    lines = [f'.TH OARS 1 "{day}" "manyoars {__version__}" "User commands"', ".SH NAME",
             "oars \\- run a training script, unchanged, on any number of ranks", ".SH SYNOPSIS",
             "\\fBoars\\fR \\fIVERB\\fR ...", ".SH DESCRIPTION", _roff(top.description or ""), ".SH OPTIONS",
             *_man_options(options_of(top)), ".SH VERBS"]
    for verb, parser in parsers.items():
        if not verb:
            continue
        usage = " ".join(parser.format_usage().removeprefix("usage:").split())
        lines += [f'.SS "oars {verb}"', f"\\fB{_roff(usage)}\\fR", ".PP", _roff(parser.description or "")]
        lines += _man_options(options_of(parser))
        if parser.epilog:
            lines += [".PP", ".nf", *(_roff(line) for line in parser.epilog.splitlines()), ".fi"]
    return "\n".join(lines) + "\n"


def _man_options(options: list[Option]) -> list[str]:
    lines = []
    for names, takes, choices, text in options:
        value = "{" + ",".join(choices) + "}" if choices else takes
        said = ", ".join(f"\\fB{_roff(name)}\\fR" for name in names)
        lines += [".TP", f"{said} \\fI{_roff(value)}\\fR".strip() if value else said, _roff(text) or "\\&"]
    return lines


def _roff(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("…", "...")
    return "\\&" + text if text[:1] in (".", "'") else text


def options_of(parser: Parser) -> list[Option]:
    """What is said of a parser's options and arguments; not what is hidden, and not its verbs."""
    found = []
    for action in parser._actions:
        if action.help is argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        takes = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
        text = (action.help or "") % {"default": action.default, "prog": parser.prog}
        found.append(Option(list(action.option_strings), takes, [str(choice) for choice in action.choices or ()], text))
    return found


def _takes_runs(options: list[Option]) -> bool:
    return any(not option.names and option.takes == "RUN" for option in options)


def _takes_script(parser: Parser) -> bool:
    """Whether all words after the first one without a dash are a script's."""
    return "[script's arguments]" in (parser.usage or "") and "[-- script's" not in (parser.usage or "")


def _top(verbs: Mapping[str, object]) -> str:
    return " ".join([*(verb for verb in verbs if " " not in verb), "--help", "--version"])


def _inner(verbs: Mapping[str, object]) -> str:
    """The verbs of ``oars data``."""
    return " ".join(verb.removeprefix("data ") for verb in verbs if verb.startswith("data "))


def _quoted(text: str) -> str:
    """For fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
