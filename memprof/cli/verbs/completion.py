"""`memprof completion`: the script that a shell sources once to complete memprof's words."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from memprof.cli.completing import VARIABLE

_SHELLS = ("bash", "zsh", "fish")
#: bash quotes special characters and adds a slash to folders if completions are marked as file names. click's script
#: does not mark them.
_BASH_FILES = """
_memprof_completion_files() {
    _memprof_completion "$@"
    local word
    for word in "${COMPREPLY[@]}"; do
        [[ -e "${word/#\\~\\//$HOME/}" ]] || return 0
    done
    compopt -o filenames 2>/dev/null
    return 0
}

complete -o nosort -F _memprof_completion_files memprof
"""


@click.command(
    epilog="""\b
Examples:
  eval "$(memprof completion bash)"                       in ~/.bashrc
  eval "$(memprof completion zsh)"                        in ~/.zshrc, below compinit
  memprof completion fish > ~/.config/fish/completions/memprof.fish
  memprof completion bash > ~/.local/share/bash-completion/completions/memprof"""
)
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print the shell completion script.

    Completes verbs, options and their values, recordings, devices and policy values. Each completion runs this memprof,
    so an upgrade needs no new script.
    """
    from memprof.cli.main import memprof  # which imports this module

    kind = get_completion_class(shell)
    assert kind is not None  # the shells are click's own
    source = kind(memprof, {}, "memprof", VARIABLE).source()
    click.echo(source + (_BASH_FILES if shell == "bash" else ""), nl=False)
