"""Numbers that the commands take, with bounds such that what is computed from them is finite."""

from jsonargparse.typing import restricted_number_type

Positive = restricted_number_type("Positive", float, [(">=", 1e-9), ("<=", 1e12)])
NonNegative = restricted_number_type("NonNegative", float, [(">=", 0), ("<=", 1e12)])
