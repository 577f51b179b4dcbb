"""Compute capabilities: 10 * major + minor as a number, as NVIDIA writes them as text."""


def capability_text(*capabilities: int) -> str:
    """Write capabilities for a reader: (80, 120) as "8.0, 12.0"."""
    return ", ".join(f"{capability // 10}.{capability % 10}" for capability in capabilities)
