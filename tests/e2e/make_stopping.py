"""Adds more end tokens to a checkpoint, so that a random model stops anywhere: ``make_stopping.py FOLDER``."""

import json
import sys
from pathlib import Path

END_TOKENS = [1, *range(200, 240)]


def main() -> None:
    """Rewrite the generation config of the checkpoint that the command line names."""
    file = Path(sys.argv[1]) / "generation_config.json"
    config = json.loads(file.read_text())
    config.pop("_from_model_config", None)
    file.write_text(json.dumps({**config, "eos_token_id": END_TOKENS}))


if __name__ == "__main__":
    main()
