"""The table of supported models, made from the registry; the README holds the same text."""

import json

from plait.worker.architectures import ADAPTERS


def supported_models_table() -> str:
    """A Markdown table, one row per architecture."""
    rows = [
        f"| `{adapter.architecture}` | {adapter.mixers} | {', '.join(adapter.checkpoints)} |"
        for adapter in ADAPTERS
    ]
    head = ["| architecture | layers | checkpoints of this kind |", "| --- | --- | --- |"]
    return "\n".join(head + rows)


def supported_models_json() -> str:
    """The same as JSON."""
    return json.dumps(
        [
            {
                "architecture": adapter.architecture,
                "model_type": adapter.model_type,
                "mixers": adapter.mixers,
                "checkpoints": list(adapter.checkpoints),
            }
            for adapter in ADAPTERS
        ],
        indent=2,
    )
