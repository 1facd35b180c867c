"""Where the demo model that comes with the package lies."""

from importlib.resources import files
from pathlib import Path


def demo_model_path() -> Path:
    """The folder of the demo checkpoint, in a checkout and in an installed wheel alike."""
    return Path(str(files("plait.deploy") / "demo_model"))
