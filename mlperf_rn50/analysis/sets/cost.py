"""Cost of runs: node-hours, money and energy. Pure functions."""
_JOULES_PER_KWH = 3.6e6


def node_hours(seconds: float, num_nodes: int) -> float:
    return seconds / 3600 * num_nodes


def cost_of(hours: float | None, price_per_node_hour: float | None) -> float | None:
    """Return the cost of node-hours, in the currency of the price, or None if either is unknown."""
    return None if hours is None or price_per_node_hour is None else hours * price_per_node_hour


def kwh(joules: float | None) -> float | None:
    return None if joules is None else joules / _JOULES_PER_KWH
