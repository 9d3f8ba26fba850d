"""Trains a model with TRL's AsyncGRPOTrainer on what the orchestrator serves: `train.py --model FOLDER --batch-size N --steps N`."""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from orchestrator_link import OrchestratorLink
from transformers.trainer_utils import get_last_checkpoint
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from without_gpu import do_without_gpu

NO_PROMPTS = Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]]})
"""TRL wants a dataset; the tasks are the orchestrator's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or name of the model to train")
    parser.add_argument("--connect", default="tcp://127.0.0.1:5555", help="trainer.bind of the orchestrator")
    parser.add_argument("--batch-size", type=int, required=True, help="batch.size of the orchestrator")
    parser.add_argument("--steps", type=int, required=True, help="max_steps of the orchestrator")
    parser.add_argument("--out", type=Path, default=Path("runs/trl-trainer"), help="checkpoints and weights")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--save-steps", type=int, default=5, help="steps between checkpoints")
    chosen = parser.parse_args()
    gpu = torch.cuda.is_available()
    if not gpu:
        do_without_gpu()
    args = AsyncGRPOConfig(
        output_dir=str(chosen.out),
        per_device_train_batch_size=chosen.batch_size,
        max_steps=chosen.steps,
        learning_rate=chosen.learning_rate,
        token_budget=0,
        save_steps=chosen.save_steps,
        save_total_limit=2,
        report_to=[],
        use_cpu=not gpu,
        bf16=gpu,
        gradient_checkpointing=gpu,
    )
    link = OrchestratorLink(chosen.connect, args, weights=chosen.out / "weights")
    trainer = AsyncGRPOTrainer(
        model=chosen.model,
        args=args,
        train_dataset=NO_PROMPTS,
        rollout_worker=link,
        weight_transfer=link,
        callbacks=[link],
    )
    checkpoint = get_last_checkpoint(str(chosen.out)) if chosen.out.is_dir() else None
    trainer.train(resume_from_checkpoint=checkpoint)


if __name__ == "__main__":
    main()
