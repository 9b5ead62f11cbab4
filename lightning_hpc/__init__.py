"""Lightning strategy, plugins and callbacks for slow networks, starved GPUs and full memory.

Importing the package registers the strategies ``"hpc"``, ``"hpc_spawn"``, … with Lightning, and does nothing else.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_hpc._mixed_namespace import register_refusals
from lightning_hpc.strategies.hpc import HPCStrategy

__version__ = "0.1.0"

if "hpc" not in StrategyRegistry:  # a second import, as after importlib.reload, must not fail
    HPCStrategy.register_strategies(StrategyRegistry)
    register_refusals(name for name in StrategyRegistry if name.startswith("hpc"))
