"""What the commands cannot do is said in one line, with exit code 2, and nothing is run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from .__main__ import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("nix", "No such command 'nix'."),
        ("--seed -1", "Invalid value for '--seed': -1 is not in the range x>=0."),
        ("--seeds 0", "Invalid value for '--seeds': 0 is not in the range x>=1."),
        ("--from -1", "Invalid value for '--from': -1 is not in the range x>=0."),
        ("--minutes 0", "Invalid value for '--minutes': 0.0 is not in the range x>0."),
        ("--workers 0", "Invalid value for '--workers': 0 is not in the range x>=1."),
        ("--only s1", "--only is of one --seed."),
        ("--seed 1 --only s1,zz", "Invalid value for --only: seed 1 has no 'zz'."),
        ("--seed 1 --seeds 2", "--seeds does not go with --seed."),
        ("--seed 1 sweep", "--seed does not go with sweep."),
        ("sweep --case 100", "Invalid value for --case: there is no fault '100'"),
        ("sweep --case rain@3", "Invalid value for --case: there is no fault 'rain'"),
        ("sweep --case stop@0", "Invalid value for --case: after the @ of 'stop@0' is"),
        ("sweep --case stop@x", "Invalid value for --case: after the @ of 'stop@x' is"),
        ("sweep --case busy@9999", "Invalid value for --case: after the @ of 'busy@9999' is"),
        ("sweep --case stop@3,busy@3", "Invalid value for --case: there is no fault 'stop'"),
        ("sweep --case stop@3 --every 2", "--every does not go with --case."),
        ("sweep --every 0", "Invalid value for '--every': 0 is not in the range x>=1."),
        ("power --seed nix", "Invalid value for --seed: 'nix' is not a number, script-full or"),
        ("power --seed -1", "Invalid value for --seed: '-1' is not a number, script-full or"),
        ("power --seed 3 --seeds 2", "--seeds does not go with --seed."),
        ("power --seed 3 --cut 9999", "Invalid value for --cut: the cuts of seed 3 are 0 to "),
        ("power --cut 3", "--cut is of one --seed."),
        ("power --seeds -1", "Invalid value for '--seeds': -1 is not in the range x>=0."),
        ("power --seeds 0 --no-script", "--no-script and --seeds 0 leave nothing to do."),
        ("processes --rounds 0", "Invalid value for '--rounds': 0 is not in the range x>=1."),
        ("processes --seed -1", "Invalid value for '--seed': -1 is not in the range x>=0."),
        ("processes --kind nix", "Invalid value for '--kind': 'nix' is not one of "),
        ("mutants --only nix", "Invalid value for --only: no mutant has 'nix' in its name."),
        ("mutants --workers 0", "Invalid value for '--workers': 0 is not in the range x>=1."),
        ("mutants --seeds 0", "Invalid value for '--seeds': 0 is not in the range x>=1."),
    ],
)
def test_what_is_asked_for_in_vain_is_refused(arguments: str, said: str) -> None:
    refused = CliRunner().invoke(main, arguments)

    assert refused.exit_code == 2
    assert refused.output.splitlines()[-1].startswith(f"Error: {said}")
    assert "broken" not in refused.output


def test_each_command_is_named_and_has_a_help_of_its_own() -> None:
    named = CliRunner().invoke(main, ["--help"]).output.partition("Commands:")[2].split("\n  ")
    commands = [line.split()[0] for line in named[1:] if not line.startswith(" ")]

    assert commands == ["mutants", "power", "processes", "sweep"]
    for command in commands:
        helped = CliRunner().invoke(main, [command, "--help"])
        assert helped.exit_code == 0
        assert "Options:" in helped.output


def test_what_README_says_is_understood() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    told = re.findall(r"-m tests\.simulation ?([^`\n]*)", readme)

    assert told
    for arguments in map(shlex.split, told):
        command = main.commands.get(arguments[0])
        if command is None:
            main.make_context("", arguments)
        else:
            command.make_context("", arguments[1:])
