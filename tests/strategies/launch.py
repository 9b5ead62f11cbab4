"""Trains with two processes and prints a digest of the weights: ``python -m tests.strategies.launch START_METHOD``."""

import hashlib
import sys

from lightning.pytorch import seed_everything

from lightning_hpc.strategies import HPCStrategy
from tests.strategies.models import Classifier
from tests.strategies.test_hpc import fit, make_trainer


def main(start_method: str) -> None:
    seed_everything(3, verbose=False)
    trainer = make_trainer(HPCStrategy(topology=[[0], [1]], start_method=start_method), 2)
    weights = fit(Classifier(), trainer)
    if trainer.is_global_zero:
        print("digest", hashlib.sha256(weights.numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1])
