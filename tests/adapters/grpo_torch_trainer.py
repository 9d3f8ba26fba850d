"""Parts of examples/grpo_torch with real torch, in a process of its own: JSON in, JSON out.

Arrays are answered with the loss and its gradient, a folder with the checkpoints that are found in it and the folders that stay.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "grpo_torch"))
torch: Any = import_module("torch")
train: Any = import_module("train")


def main() -> None:
    given = json.loads(sys.argv[1])
    if "output" in given:
        output = Path(given["output"])
        try:
            step, folder = train.find_checkpoint(output, given["resume_from"])
        except SystemExit as refused:
            print(json.dumps({"refused": str(refused)}))
            return
        unused = train.unused_folder(output, given["step"]).name
        train.remove_old(output, given["step"], given["keep"], given["keep_checkpoints"])
        left = sorted(path.name for path in output.iterdir())
        print(json.dumps({"step": step, "folder": folder and folder.name, "unused": unused, "left": left}))
        return
    rows = {name: torch.tensor(given[name]) for name in ("logprobs", "advantages", "mask")}
    ours = torch.tensor(given["ours"], requires_grad=True)
    loss, truncated = train.policy_loss(ours, rows, given["highest_ratio"])
    loss.backward()
    print(json.dumps({"loss": loss.item(), "truncated": truncated.item(), "gradient": ours.grad.tolist()}))


if __name__ == "__main__":
    main()
