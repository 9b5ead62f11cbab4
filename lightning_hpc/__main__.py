"""``python -m lightning_hpc`` is the command ``lightning-hpc``."""

from lightning_hpc.cli import main

if __name__ == "__main__":
    main()
