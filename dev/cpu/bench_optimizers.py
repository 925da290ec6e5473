#!/usr/bin/env python3
"""AdamW and Muon on the generated stories: `make bench-optimizers`.

Sweeps the learning rate of each with one seed, trains with the best rate and more seeds, and compares the validation loss by
tokens and by seconds. Muon also trains on a share of the tokens, with a schedule of its own that ends there. Runs take turns,
so that other load on the machine slows both.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

RATES = {"adamw": [2e-3, 4e-3, 8e-3, 1.6e-2], "muon": [2e-3, 4e-3, 8e-3, 1.6e-2]}


def train(program, folder, optimizer, rate, seed, steps):
    """The validations of a run: (tokens, seconds of steps, loss), the last one at its end."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [program, "--device=cpu", f"--optimizer={optimizer}", f"--lr={rate}", f"--seed={seed}", f"--steps={steps}", "--val-every=100",
               "--sample-tokens=0", f"--out-dir={folder}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(result.stderr.strip() or f"error: {program} ended with status {result.returncode}")
    seconds, validations = 0.0, []
    for line in map(json.loads, (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()[1:]):
        seconds += line["step_ms"] / 1e3
        if line.get("val_loss") is not None:
            validations.append((line["tokens"], seconds, line["val_loss"]))
    return validations


def main():
    parser = argparse.ArgumentParser(description="Compares AdamW and Muon on the generated stories.")
    parser.add_argument("program", help="train_gpt, as built")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.7, help="of the tokens, for a shorter run of Muon")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        of = lambda optimizer, rate, seed, steps: train(arguments.program, pathlib.Path(folder) / "run", optimizer, rate, seed, steps)
        swept = {optimizer: [] for optimizer in RATES}
        for pair in zip(*RATES.values()):
            for optimizer, rate in zip(RATES, pair):
                swept[optimizer].append((of(optimizer, rate, 1, arguments.steps)[-1][2], rate))
        best = {optimizer: min(found)[1] for optimizer, found in swept.items()}
        kinds = [("adamw", arguments.steps), ("muon", arguments.steps), ("muon", round(arguments.share * arguments.steps))]
        runs = {kind: [] for kind in kinds}
        for seed in range(1, arguments.seeds + 1):
            for optimizer, steps in kinds:
                runs[optimizer, steps].append(of(optimizer, best[optimizer], seed, steps))

    print("\nvalidation loss after all steps, by learning rate (seed 1)\n")
    for optimizer, found in swept.items():
        print(f"  {optimizer:<6}", "  ".join(f"{rate:g}: {loss:.4f}" for loss, rate in found))
    print(f"\nwith the best rates, mean of {arguments.seeds} seeds (and the largest distance from it)\n")
    print(f"  {'optimizer':<9} {'steps':>6} {'tokens':>10} {'seconds':>8} {'loss':>8}")
    for (optimizer, steps), validations in runs.items():
        losses = [run[-1][2] for run in validations]
        mean = statistics.mean(losses)
        print(f"  {optimizer:<9} {steps:6} {validations[0][-1][0]:10} {statistics.mean(run[-1][1] for run in validations):8.1f} {mean:8.4f}"
              f" ({max(abs(loss - mean) for loss in losses):.4f})")
    print("\nloss on the way (means)\n")
    print(f"  {'tokens':>10} " + " ".join(f"{optimizer:>8} {'seconds':>8}" for optimizer in RATES))
    for adamw, muon in zip(zip(*runs[kinds[0]]), zip(*runs[kinds[1]])):
        columns = [(statistics.mean(loss for _, _, loss in at), statistics.mean(seconds for _, seconds, _ in at)) for at in (adamw, muon)]
        print(f"  {adamw[0][0]:10} " + " ".join(f"{loss:8.4f} {seconds:8.1f}" for loss, seconds in columns))


if __name__ == "__main__":
    main()
