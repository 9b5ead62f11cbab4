"""Lightning strategy, plugins and callbacks for slow networks, starved GPUs and full memory."""

__version__ = "0.1.0"
