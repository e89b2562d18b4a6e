"""Cost of runs: nodes, node-hours, money and energy. Pure functions."""

MAX_PER_NODE = 16  # accelerators; some descriptions call a pod of hundreds one node
_JOULES_PER_KWH = 3.6e6


def known_nodes(
    stated: int | None, num_accelerators: int | None, num_ranks: int | None
) -> int | None:
    """Return the number of nodes; None if these have more accelerators than a node has, without a
    rank for each."""
    is_pod = (num_accelerators or 0) > MAX_PER_NODE * (
        stated or 0
    ) and num_accelerators != num_ranks
    return None if is_pod else stated


def node_hours(seconds: float, num_nodes: int) -> float:
    return seconds / 3600 * num_nodes


def cost_of(hours: float | None, price_per_node_hour: float | None) -> float | None:
    """Return the cost of node-hours, in the currency of the price, or None if either is unknown."""
    return None if hours is None or price_per_node_hour is None else hours * price_per_node_hour


def kwh(joules: float | None) -> float | None:
    return None if joules is None else joules / _JOULES_PER_KWH
