"""The subcommands of ``lightning-hpc`` that are ours: one module each; `main` takes the arguments after its name."""
