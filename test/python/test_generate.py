"""--generate: the text is PyTorch's on every mesh, appears token by token, and is the program's only result."""

import dataclasses
import os
import signal
import socket
import subprocess

import numpy as np
import pytest
import torch

import model_bounds
import program
import pseudo_terminal
import reference_model
import refused
from greedy_text import PROMPT, TOKENS, contexts, most_likely, telling_weights
from model_comparison import save_weights
from reference_gpt2 import GPT2, SWITCHES_OFF

SEED = int(os.environ.get("SEED", int.from_bytes(os.urandom(4), "little")))
SIZES = GPT2(layers=4, heads=2, channels=32, seq_len=12, vocab_size=50)


def as_prompt(tokens):
    return f"--prompt={' '.join(map(str, tokens))}"


def generate(*options, **how):
    return program.run("--generate", *options, **how)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(options, the likeliest text) for weights in a file."""
    folder = tmp_path_factory.mktemp("generate")
    weights, expected = telling_weights(SIZES, SEED)
    save_weights(folder / "init.safetensors", weights)
    options = [*SIZES.options(), f"--init={folder}/init.safetensors", f"--sample-tokens={TOKENS}", "--temperature=0",
               "--device=cpu", "--dtype=fp32"]
    return options, weights, expected


PIPELINE, TENSOR = "--pipeline-parallel=2", "--tensor-parallel=2"
SEQUENCE = "--sequence-parallel"


@pytest.mark.parametrize("ranks, mesh", [
    (1, []), (2, []), (2, ["--zero-stage=3"]), (2, [PIPELINE]), (2, [PIPELINE, "--virtual-stages=2"]), (2, [TENSOR]),
    (2, [TENSOR, SEQUENCE]), (4, [PIPELINE, "--zero-stage=3"]), (4, [PIPELINE, TENSOR, SEQUENCE]),
], ids=lambda value: " ".join(value) if isinstance(value, list) else str(value))
def test_the_likeliest_text_on_every_mesh(model, ranks, mesh):
    options, _, expected = model
    result = generate(*options, as_prompt(PROMPT), *mesh, ranks=ranks)
    assert result.stdout == " ".join(map(str, [*PROMPT, *expected])) + "\n", f"SEED={SEED}\n{result.stderr}"


@pytest.mark.parametrize("ranks, options", [
    (1, ["--recompute=block"]), (1, ["--recompute=block", "--recompute-every=2"]), (2, ["--recompute=selective", PIPELINE]),
    (2, ["--recompute=block", TENSOR, SEQUENCE]), (2, ["--recompute=block", PIPELINE, "--virtual-stages=2"]),
    # Chunks of one block. The model's second and fourth block recompute; each is the first of its chunk.
    (2, ["--recompute=block", "--recompute-every=2", PIPELINE, "--virtual-stages=2"]),
], ids=lambda value: " ".join(value) if isinstance(value, list) else str(value))
def test_samples_where_activations_are_not_kept(model, ranks, options, tmp_path):
    """The cache normally lies where a training step keeps activations. If these are not kept, it needs memory of its own."""
    model_options, _, expected = model
    stories = tmp_path / "text.bin"
    program.write_token_file(stories, np.arange(500) % SIZES.vocab_size)
    text = program.run(*model_options, as_prompt(PROMPT), *options, "--steps=0", f"--train-data={stories}",
                       "--global-batch-tokens=48", "--micro-batch-size=1", f"--out-dir={tmp_path}/run", ranks=ranks).stdout
    assert "\n" + " ".join(map(str, [*PROMPT, *expected])) + "\n" in text, f"SEED={SEED}"



@pytest.mark.parametrize("switches", SWITCHES_OFF, ids=str)
def test_without_biases_and_with_a_head_of_its_own(switches, tmp_path):
    sizes = dataclasses.replace(SIZES, **switches)
    weights, expected = telling_weights(sizes, SEED)
    save_weights(tmp_path / "init.safetensors", weights)
    for ranks, mesh in ((1, []), (2, ["--zero-stage=3"]), (2, [PIPELINE]), (2, [TENSOR, SEQUENCE])):
        text = generate(*sizes.options(), f"--init={tmp_path}/init.safetensors", f"--sample-tokens={TOKENS}", "--temperature=0",
                        "--device=cpu", "--dtype=fp32", as_prompt(PROMPT), *mesh, ranks=ranks).stdout
        assert text == " ".join(map(str, [*PROMPT, *expected])) + "\n", f"SEED={SEED} {mesh}"


def test_a_prompt_longer_than_the_context(model):
    options, weights, _ = model
    prompt = [(7 * i * i + 3) % SIZES.vocab_size for i in range(30)]
    expected, lead = most_likely(weights, SIZES, prompt=prompt)
    text = generate(*options, as_prompt(prompt)).stdout.split()
    assert [int(token) for token in text[:len(prompt)]] == prompt
    # Up to the first token that does not lead clearly; the prompt was not chosen for clear leads.
    assert lead < 1e-3 or [int(token) for token in text[len(prompt):]] == expected, f"SEED={SEED}"


def test_bf16(model):
    """Each token is the likeliest, within the effect of bf16's roundings on two logits (model_bounds.py)."""
    options, weights, _ = model
    held = {name: weight.to(torch.bfloat16).double() for name, weight in weights.items()}
    text = [int(token) for token in generate(*options, "--dtype=bf16", as_prompt(PROMPT)).stdout.split()]
    store = reference_model.rounded_activations(torch.Generator().manual_seed(0))
    for i, begin in enumerate(contexts(PROMPT, TOKENS, SIZES.seq_len)):
        context = torch.tensor([text[begin:len(PROMPT) + i]])
        exact = SIZES.logits(held, context)[0, -1]
        best, chosen = exact.argmax().item(), text[len(PROMPT) + i]
        behind = (exact[best] - exact[chosen]).item()
        if behind == 0:
            continue
        draws = [SIZES.logits(held, context, store=store)[0, -1] for _ in range(model_bounds.DRAWS)]
        moved = [(drawn[best] - drawn[chosen]).item() - behind for drawn in draws]
        assert behind <= model_bounds.DEVIATIONS * model_bounds.root_mean_square(moved), f"SEED={SEED}: token {i}"


def test_waiting_threads_spin_for_a_moment(model):
    """The loops of a token take no longer than waking a thread. Those of training do: there, threads that wait sleep at once."""
    options, _, _ = model
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment["OMP_DISPLAY_ENV"] = "verbose"

    def spins(*command):
        said = subprocess.run([PATH_OF_PROGRAM, *command], env=environment, cwd=program.ROOT, capture_output=True, text=True,
                              check=True, timeout=100 * program.PATIENCE).stderr
        if "GOMP_SPINCOUNT" not in said:
            pytest.skip("not GNU OpenMP")
        return said.split("GOMP_SPINCOUNT = '")[-1].split("'")[0]

    assert spins("--generate", *options, as_prompt(PROMPT)) == "1000"
    assert spins("--version") == "0"


def test_choices(model):
    options, _, expected = model
    greedy = " ".join(map(str, [*PROMPT, *expected])) + "\n"

    def text(*choice):
        return generate(*options, as_prompt(PROMPT), "--temperature=3", *choice).stdout

    assert text("--top-k=1") == text("--top-p=0") == greedy
    assert text("--seed=4") == text("--seed=4")
    assert len({text("--seed=4"), text("--seed=5"), text("--seed=4", "--top-p=0.3"), greedy}) == 4
    assert generate(*options, as_prompt(PROMPT), "--sample-tokens=0").stdout == as_prompt(PROMPT)[9:] + "\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of a model of bytes, and its training's sample."""
    folder = tmp_path_factory.mktemp("trained")
    text = program.run(*program.SMALL, "--steps=20", f"--out-dir={folder}/run", "--sample-tokens=30", "--prompt=The",
                       "--val-batches=1", "--temperature=2").stdout
    [sample] = text.split("sample after step 20 ")[1].split("\n", 1)[1:]
    return folder / "run", sample[:sample.index("\n----")]


PATH_OF_PROGRAM = str((program.ROOT / program.PROGRAM).resolve())


def test_of_a_checkpoint(trained, tmp_path):
    """Its model without giving its sizes, and its training's sample. No file is written."""
    run, sample = trained
    before = refused.contents(run)
    for resume in (["--resume", run / "checkpoint-00000020"], ["--resume", run], ["--resume", "--out-dir", run]):
        result = subprocess.run([PATH_OF_PROGRAM, "--generate", *map(str, resume), "--prompt=The", "--sample-tokens=30", "--temperature=2"],
                                cwd=tmp_path, capture_output=True, text=True, timeout=100 * program.PATIENCE)
        assert result.returncode == 0, result.stderr
        assert result.stdout == sample + "\n"
        said = result.stderr.splitlines()
        assert len(said) == 2 and "checkpoint-00000020 after step 20" in said[0] and said[1].startswith("30 tokens, the first after")
    assert refused.contents(run) == before and not list(tmp_path.iterdir())


@pytest.mark.parametrize("switches", SWITCHES_OFF, ids=str)
def test_of_a_checkpoint_with_switches_off(switches, tmp_path):
    """Switches come from the checkpoint, like its sizes, even if a configuration file has others. A contradicting option is
    refused."""
    off = [f"--{name.replace('_', '-')}=false" for name in switches]
    text = program.run(*program.SMALL, *off, "--steps=3", f"--out-dir={tmp_path}/run", "--sample-tokens=30", "--prompt=The",
                       "--val-batches=1", "--temperature=2", f"--export={tmp_path}/w.safetensors").stdout
    sample = text.split("sample after step 3 ")[1].split("\n", 1)[1]
    (tmp_path / "c.toml").write_text("bias = true\ntied-head = true\n")
    options = [f"--resume={tmp_path}/run", "--prompt=The", "--sample-tokens=30", "--temperature=2"]
    for more in ([], [f"--config={tmp_path}/c.toml"]):
        assert generate(*options, *more).stdout == sample[:sample.index("\n----")] + "\n"
    for option in off:
        result = generate(*options, option.replace("false", "true"), check=False)
        assert result.returncode == 1 and result.stdout == ""
        assert refused.one_error(result.stderr) == \
            f"{tmp_path}/run/checkpoint-00000003 has another model, with {option}; give {option}"


def test_of_a_runs_configuration(trained, tmp_path):
    """Settings for training, such as files to export and to score, are ignored."""
    run, sample = trained
    configuration = tmp_path / "c.toml"
    configuration.write_text(f'steps = 7\nexport = "{tmp_path}/x"\nmetrics = "{tmp_path}/m"\ninit = "{tmp_path}/none"\n'
                             f'eval-hellaswag = "{tmp_path}/h"\nlr = 0.1\nglobal-batch-tokens = 32\n')
    text = generate(f"--config={configuration}", f"--resume={run}/checkpoint-00000020", "--prompt=The", "--sample-tokens=30",
                    "--temperature=2").stdout
    assert text == sample + "\n" and list(tmp_path.iterdir()) == [configuration]


def start(run, *options):
    return subprocess.Popen([PATH_OF_PROGRAM, "--generate", f"--resume={run}/checkpoint-00000020", "--sample-tokens=1000000",
                             "--prompt=The", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_each_token_is_written_on_its_own(model):
    """Standard output is a socket that keeps each write separate."""
    options, _, expected = model
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, subprocess.Popen([PATH_OF_PROGRAM, "--generate", *options, as_prompt(PROMPT)], stdout=theirs, stderr=subprocess.PIPE) as process:
        theirs.close()
        written = list(iter(lambda: ours.recv(1 << 16).decode(), ""))
        said = process.stderr.read()
    assert process.returncode == 0, said
    assert [int(piece) for piece in written[:-1]] == [*PROMPT, *expected] and written[-1] == "\n"


def test_comes_as_a_stream_and_ends_with_ctrl_c(trained):
    with start(trained[0]) as process:
        first = process.stdout.read(300)
        assert first.startswith(b"The") and process.poll() is None
        process.send_signal(signal.SIGINT)
        # (communicate() would lose the output that was read ahead.)
        rest, said = process.stdout.read(), process.stderr.read()
        assert process.wait(60 * program.PATIENCE) == 0, said
    assert rest.endswith(b"\n")
    (first + rest).decode()  # whole characters only
    assert said.count(b"\n") == 2 and b"tokens/s" in said


def catches(process, number):
    """Whether a process handles a signal."""
    with open(f"/proc/{process.pid}/status") as status:
        [mask] = [line.split()[1] for line in status if line.startswith("SigCgt:")]
    return int(mask, 16) >> (number - 1) & 1


def test_ctrl_c_before_the_first_token_leaves_nothing_but_text(trained):
    """From the moment that it handles the signal, the program ends as it does within a text."""
    with start(trained[0]) as process:
        while not catches(process, signal.SIGINT):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        text, said = process.communicate(timeout=60 * program.PATIENCE)
    assert process.returncode == 0 and b"note:" not in text and said.count(b"\n") == 2, (text, said)


def test_the_text_of_two_processes_is_whole_on_a_terminal(model):
    options, _, expected = model
    command = [program.PROGRAM, "--processes", "2", "--generate", *options, as_prompt(PROMPT)]
    for _ in range(5):
        status, written = pseudo_terminal.run(command)
        lines = pseudo_terminal.screen(written)
        assert status == 0 and lines[0].startswith("train_gpt ") and lines[2].startswith(f"{TOKENS} tokens, the first after "), written
        assert lines[1] == " ".join(map(str, [*PROMPT, *expected])) and not any(lines[3:]), f"SEED={SEED}: {written}"


def test_ends_when_nobody_reads_on(trained):
    with start(trained[0]) as process:
        process.stdout.read(100)
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(60 * program.PATIENCE) == 0, said
    assert b"error" not in said


def test_says_when_it_cannot_write(trained):
    with open("/dev/full", "w") as full:
        result = subprocess.run([PATH_OF_PROGRAM, "--generate", f"--resume={trained[0]}/checkpoint-00000020"], stdout=full,
                                stderr=subprocess.PIPE, text=True, timeout=60 * program.PATIENCE)
    assert result.returncode == 1 and "error: cannot write to standard output: No space left on device" in result.stderr
