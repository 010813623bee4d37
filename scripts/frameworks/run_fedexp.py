"""Federated averaging by fedexp.

python scripts/frameworks/run_fedexp.py WORK RECORD OVERRIDE ...
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from fedexp_rounds import OFF
from work import arguments, write_record


def main() -> None:
    from safetensors.torch import load_file

    from fedexp.config.compose import compose
    from fedexp.running.execute import execute
    from fedexp.storage.files import read_jsonl

    work, record, overrides = arguments()
    with tempfile.TemporaryDirectory() as outputs:
        config = compose([*OFF, *overrides, f"output_root={outputs}"])
        folder = Path(execute(config, say=lambda _: None)["folder"])
        final = load_file(folder / "model.safetensors")
        timing = [row["seconds"] for row in read_jsonl(folder / "timing.jsonl")]
        metrics = list(read_jsonl(folder / "metrics.jsonl"))

    seconds = [sum(v for phase, v in row.items() if phase != "evaluate") for row in timing]
    # fedexp counts steps, but not samples. Every participant uses each of its samples
    # once
    samples = [orders.size for orders in work.orders]
    write_record(
        record,
        seconds,
        [row["local_steps"] for row in metrics],
        samples,
        [final[name].numpy() for name in work.names],
    )


# The condition is needed, because worker processes of an engine import this file
if __name__ == "__main__":
    main()
