"""What does a run cost? Node-hours, and money where a price is given. Pure."""


def node_hours(seconds: float, num_nodes: int) -> float:
    """Hours of all nodes."""
    return seconds / 3600 * num_nodes
