"""The subcommands of ``lightning-hpc`` that are Lightning's, with ours beside them in the help."""

from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from typing_extensions import override

import lightning_hpc

# A class is known by its name alone once it was imported.
import lightning_hpc.callbacks
import lightning_hpc.data
from lightning_hpc.cli import COMMANDS


class TrainingCLI(LightningCLI):
    """LightningCLI whose ``--help`` lists our commands too. They have parsers of their own, so it runs none of them."""

    def __init__(self) -> None:
        super().__init__(
            save_config_kwargs={"overwrite": True},  # else a second run into the same folder is refused
            parser_class=_Parser,
            parser_kwargs={
                "prog": "lightning-hpc",
                "description": "Trains a LightningModule from a YAML file or from arguments, as LightningCLI does; the"
                " strategies hpc, hpc_spawn, … and the classes of lightning_hpc are known by name. Measures and"
                " predicts what communication costs.",
                "version": lightning_hpc.__version__,
            },
        )

    @override
    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        assert isinstance(self.parser, _Parser)
        for name, summary in COMMANDS.items():
            self.parser.listed.add_subcommand(name, ArgumentParser(), help=summary)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        super().parse_arguments(parser, args)
        name = self.config.subcommand
        if name in COMMANDS:  # which `main` runs where it comes first
            parser.error(f"{name} must be the first argument, as in lightning-hpc {name} --help")


class _Parser(LightningArgumentParser):
    """Keeps the list of subcommands, which Lightning fills, for more of them."""

    listed: Any  # whose class has a public name in recent versions of jsonargparse only

    @override
    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        self.listed = super().add_subcommands(*args, **kwargs)
        return self.listed
