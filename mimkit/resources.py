"""Where the files that travel with the package lie: in the wheel, or in the checkout."""

from pathlib import Path


def configs_folder() -> Path:
    """`mimkit/configs` where installed, else the checkout's `configs/`."""
    installed = Path(__file__).parent / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "configs"


def shipped_config(name: str) -> Path | None:
    """A shipped configuration by its name, with or without `.yaml`."""
    path = configs_folder() / (name if name.endswith(".yaml") else f"{name}.yaml")
    return path if path.exists() else None
