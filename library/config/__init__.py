"""The one typed schema behind TOML keys, command line flags, ``--help``, the JSON schema and the docs."""

from library.config.load import load_config
from library.config.schema import TrainConfig

__all__ = ["TrainConfig", "load_config"]
