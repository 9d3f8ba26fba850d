"""A GRPO trainer for HF transformers, on one device or many, to be copied and changed.

    torchrun --nproc-per-node 2 train.py --model MODEL --link tcp://127.0.0.1:5555 --output runs/weights

Every rank has the whole model and its share of each batch; gradients are summed over the ranks, once a step. After step N
the weights are in OUTPUT/step_N (step_N_1, where that was written before), which is published as version N. Every few steps the state of the optimizer is put
beside them, and from then on the folder is a checkpoint. A trainer that is started again, after whatever happened, goes on
from the last one: the orchestrator still has every batch since then (trainer.keep_batches = "checkpoint").
"""

import argparse
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from orchestrator.trainer import LogprobMismatch, TrainerClient, TrainingBatch, micro_batches, pad
from orchestrator.trainer.torch_dataset import tensors

OPTIMIZER_FILE = "optimizer.pt"
"""What makes a folder of weights a checkpoint."""


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO with HF transformers; start it with torchrun.")
    parser.add_argument("--model", required=True, help="folder or name of the model to begin with")
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder for weights and checkpoints, seen by all ranks and engines",
    )
    parser.add_argument(
        "--link", default="tcp://127.0.0.1:5555", help="address of the orchestrator (trainer.bind)"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--clip-gradient", type=float, default=1.0, help="highest norm of the gradient")
    parser.add_argument(
        "--truncate-ratio", type=float, default=2.0, help="highest importance ratio of a token"
    )
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=8192, help="most tokens in a forward pass, fill included"
    )
    parser.add_argument(
        "--checkpoint-every", type=int, default=10, help="steps from one checkpoint to the next"
    )
    parser.add_argument(
        "--keep", type=int, default=4, help="folders of weights that stay, beside checkpoints"
    )
    parser.add_argument("--keep-checkpoints", type=int, default=3, help="checkpoints that stay, at least 1")
    parser.add_argument("--resume-from", type=int, help="step of an earlier checkpoint to go on from")
    return parser.parse_args()


def token_logprobs(model: torch.nn.Module, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """The log-probability of every target, at the temperature that it was sampled with; same shape as the targets."""
    device = rows["tokens"].device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        output = model(
            input_ids=rows["tokens"], attention_mask=rows["attention_mask"], position_ids=rows["position_ids"]
        )
    logits = output.logits.float() / rows["temperatures"].unsqueeze(-1)
    return logits.gather(-1, rows["targets"].unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def policy_loss(
    logprobs: torch.Tensor, rows: dict[str, torch.Tensor], highest_ratio: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncated importance sampling, summed over the sampled tokens, and how many of them were truncated.

    A token weighs as much as it is likelier now than when it was sampled, up to the highest ratio, and the weight is no
    part of the gradient: what was sampled by an older policy counts, and no single token takes over.
    """
    ratio = (logprobs.detach() - rows["logprobs"]).exp()
    terms = ratio.clamp(max=highest_ratio) * rows["advantages"] * logprobs
    truncated = (ratio > highest_ratio) & rows["mask"]
    return -terms[rows["mask"]].sum(), truncated.sum()


def train_on(
    batch: TrainingBatch,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    arguments: argparse.Namespace,
) -> dict[str, float]:
    """One step of the optimizer on a batch of all ranks; returns what there is to report about it."""
    mismatch = LogprobMismatch()
    loss = truncated = 0.0
    for part in micro_batches(batch.sequences, arguments.micro_batch_tokens, padded=True):
        rows = {name: values.to(device) for name, values in tensors(pad(part)).items()}
        logprobs = token_logprobs(model, rows)
        part_loss, part_truncated = policy_loss(logprobs, rows, arguments.truncate_ratio)
        # The tokens of all ranks, so that a sum of the ranks' gradients is that of the mean over tokens.
        (part_loss / batch.trained_tokens).backward()
        loss += part_loss.item()
        truncated += part_truncated.item()
        # Only what the present weights sampled can agree with them.
        fresh = torch.tensor([one.version == one.version_end == batch.version for one in part]).unsqueeze(-1)
        mismatch.add(logprobs.detach().cpu(), rows["logprobs"].cpu(), rows["mask"].cpu() & fresh)
    # Ranks may have made different numbers of micro-batches: they meet here, once a step.
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    norm = torch.nn.utils.clip_grad_norm_(
        model.parameters(), arguments.clip_gradient, error_if_nonfinite=True
    )
    optimizer.step()
    optimizer.zero_grad()
    ranks = gather((loss, truncated, float(batch.rewards.sum()), mismatch))
    return {
        "reward": sum(rank[2] for rank in ranks) / batch.batch_size,
        "loss": sum(rank[0] for rank in ranks) / batch.trained_tokens,
        "gradient_norm": norm.item(),
        "truncated": sum(rank[1] for rank in ranks) / batch.trained_tokens,
        **LogprobMismatch.of_all(rank[3] for rank in ranks).metrics(),
    }


def gather(value: Any) -> list[Any]:
    """What every rank gave, in the order of the ranks."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def save_weights(model: Any, tokenizer: Any, folder: Path) -> None:
    """A folder that is whole as soon as it has its name."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)


def make_checkpoint(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Put the optimizer's state beside the weights of a step; from then on a trainer can go on from there."""
    unfinished = folder / f"{OPTIMIZER_FILE}.unfinished"
    torch.save(optimizer.state_dict(), unfinished)
    unfinished.rename(folder / OPTIMIZER_FILE)
    os.sync()  # earlier batches are given up for this: it must survive the machine too


def folders_in(output: Path, holding: str = "") -> list[tuple[int, int, Path]]:
    """Folders of weights that hold a file of that name: their step, which time it was trained on, and where; oldest first."""
    folders = [path for path in output.glob("step_*") if (path / holding).exists()]
    found = ((re.fullmatch(r"step_(\d+)(?:_(\d+))?", path.name), path) for path in folders)
    return sorted((int(name[1]), int(name[2] or 0), path) for name, path in found if name)


def unused_folder(output: Path, step: int) -> Path:
    """A folder that was published is never written to again: an engine may be reading it."""
    times = [again for number, again, _ in folders_in(output) if number == step]
    return output / (f"step_{step}_{max(times) + 1}" if times else f"step_{step}")


def find_checkpoint(output: Path, resume_from: int | None) -> tuple[int, Path | None]:
    """The step and the folder to go on from: the last ones, or those of a step, whose later checkpoints then count no more."""
    found = folders_in(output, OPTIMIZER_FILE)
    if resume_from is not None and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        if resume_from not in [step for step, *_ in found]:
            raise SystemExit(f"{output} has checkpoints of {[step for step, *_ in found]}, not {resume_from}")
        for _, _, folder in [one for one in found if one[0] > resume_from]:
            (folder / OPTIMIZER_FILE).rename(folder / f"{OPTIMIZER_FILE}.given_up")
        found = folders_in(output, OPTIMIZER_FILE)
    return (found[-1][0], found[-1][2]) if found else (0, None)


def remove_old(output: Path, step: int, keep: int, keep_checkpoints: int) -> None:
    """Engines that come back load the newest weights, and a trainer one of the last checkpoints; the others can go."""
    kept = [folder for *_, folder in folders_in(output, OPTIMIZER_FILE)[-keep_checkpoints:]]
    for old, _, folder in folders_in(output):
        if old <= step - keep and folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    arguments = read_arguments()
    if "RANK" not in os.environ:
        raise SystemExit("start this with torchrun, for example: torchrun --nproc-per-node 1 train.py …")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        # torchrun's own store outlives its restarts, and new ranks would look for each other where the dead ones were.
        raise SystemExit(
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, or ranks that it starts again may hang"
        )
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    disable_progress_bar()
    output = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    # What rank 0 has found: a shared disk may show a new folder to one rank later than to another.
    step, folder = gather(find_checkpoint(output, arguments.resume_from) if rank == 0 else None)[0]
    source = folder or arguments.model
    tokenizer = AutoTokenizer.from_pretrained(source)
    # Weights are in single precision; on a GPU the model computes in half. No dropout, as where it was sampled.
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(device).eval()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=arguments.weight_decay
    )
    if step:
        optimizer.load_state_dict(torch.load(source / OPTIMIZER_FILE, map_location=device, weights_only=True))
    if rank == 0:
        print(f"begins behind step {step} with {source}, {world_size} ranks on {device.type}", flush=True)

    with TrainerClient(
        arguments.link, rank=rank, world_size=world_size, resume_after=step, auto_ack=False
    ) as trainer:
        for batch in trainer:
            began = time.monotonic()
            metrics = train_on(batch, model, optimizer, device, arguments)
            if rank == 0:
                folder = unused_folder(output, batch.step)
                save_weights(model, tokenizer, folder)
                trainer.publish(batch.step, str(folder), step=batch.step)
                metrics["train_s"] = time.monotonic() - began
                trainer.report(batch.step, metrics)
                told = "  ".join(f"{name} {value:.3g}" for name, value in metrics.items())
                print(f"step {batch.step}  {told}", flush=True)
            dist.barrier()  # a batch is acknowledged when what was learned from it is on disk and published
            trainer.ack(batch.step)
            if batch.step % arguments.checkpoint_every == 0:
                dist.barrier()  # a checkpoint is made when every rank is done with its step
                if rank == 0:
                    make_checkpoint(optimizer, folder)
                    trainer.checkpointed(batch.step)
            if rank == 0:
                remove_old(output, batch.step, arguments.keep, arguments.keep_checkpoints)
    if rank == 0:
        print(f"the run is over: {trainer.finished}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
