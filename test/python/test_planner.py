"""./train_gpt plan (docs/planner.md)."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys

import planned
import program
import pytest
from planned import plan


def test_plans_equal_runs(tmp_path, configurations=10):
    draw = planned.seeded()
    for number in range(configurations):
        options, ranks = planned.random_options(draw, most_ranks=4, tiers=["nvme"], folder=tmp_path / "disk")
        print(shlex.join(options), "on", ranks)
        run = program.train(tmp_path / str(number), *options, "--device=cpu", "--steps=2", ranks=ranks)
        planned.assert_equals_run(plan(*options, "--device=cpu", f"--processes={ranks}")[0], run)


def test_the_command_starts_the_run(tmp_path):
    made, status = plan("--layers=2", "--pipeline-parallel=2", "--processes=2", "--steps=1", f"--out-dir={tmp_path}/a run")
    assert status == 0 and made["memory"]["verdict"] == "fits"
    subprocess.run(["bash", "-c", made["command"]], cwd=program.ROOT, check=True, capture_output=True, timeout=60 * program.PATIENCE)
    planned.assert_equals_run(made, program.Run(tmp_path / "a run"))
    assert plan("--model=llama-tiny", "--lora-rank=4")[0]["command"].endswith(" --lora-rank=4 --init FOLDER")


def test_statuses():
    assert plan("--model=gpt2", "--gpu=H100")[1] == 0
    made, status = plan("--model=llama3-8b", "--gpu=4090")
    assert status == 2 and made["memory"]["verdict"] == "does not fit" and made["why_not"][0]["rule"] == "memory of a rank"
    bytes_ = plan("--model=gpt2", "--gpu=H100", "--micro-batch-size=1", "--global-batch-tokens=1024")[0]["memory"]["bytes"]
    for gib, expected in [(bytes_ / 2**30 + 1 - 1e-6, 2), (bytes_ / 2**30 + 1 + 1e-6, 3), (bytes_ / 2**30 + 2 - 1e-6, 3), (bytes_ / 2**30 + 2 + 1e-6, 0)]:
        made, status = plan("--model=gpt2", "--gpu=H100", "--micro-batch-size=1", "--global-batch-tokens=1024", f"--gpu-memory={gib}")
        assert status == expected, gib
        assert made["memory"]["fits"] == (status != 2)
    for options, line in [(["--gpu=X"], "--gpu X: unknown GPU; choose one of: A100-40, "), (["--gpus=0"], "--gpus '0' is not a whole number"),
                          (["--device=cpu", "--gpu=H100"], "--device cpu: --gpu describes a GPU"), (["--nodes=3"], "--nodes 3 are more than the 1 process"),
                          (["--steps=-1"], "--steps -1 is out of range")]:
        result = program.run("plan", *options, check=False)
        assert result.returncode == 1 and result.stderr.startswith(f"error: {line}") and result.stderr.count("\n") == 1 and not result.stdout


IMPOSSIBLE = {
    "heads": ["--tensor-parallel=3", "--gpus=3"],
    "head size": ["--heads=5"],
    "layers": ["--pipeline-parallel=8", "--gpus=8"],
    "few processes": ["--pipeline-parallel=2", "--tensor-parallel=2", "--gpus=2"],
    "processes": ["--pipeline-parallel=2", "--gpus=5"],
    "batch": ["--gpus=3", "--global-batch-tokens=1024"],
    "micro-batch": ["--gpus=2", "--micro-batch-size=5", "--global-batch-tokens=1024"],
    "interleaved": ["--gpus=2", "--pipeline-parallel=2", "--pipeline-schedule=interleaved", "--micro-batch-size=8", "--global-batch-tokens=512"],
    "chunks": ["--gpus=4", "--pipeline-parallel=4", "--pipeline-schedule=interleaved", "--virtual-stages=2"],
    "shards": ["--gpus=6", "--zero-stage=1", "--zero-shard-size=4"],
    "a stage without layers": ["--gpus=4", "--layers=24", "--pipeline-parallel=4", "--pipeline-layers=8,0,8,8"],
    "channels of a norm": ["--gpu=H100", "--channels=20480", "--heads=160", "--dtype=bf16"],
    "passes": ["--gpu=H100", "--global-batch-tokens=67108864", "--micro-batch-size=1"],
    "memory": ["--model=llama3-8b", "--gpus=8", "--gpu=H100"],
    "memory, with a host beside it": ["--model=llama3-8b", "--gpu=4090", "--gpus=2", "--host-memory=192GB"],
    "memory, in its formats": ["--model=llama3-70b", "--gpus=8"],
    "memory, for a long context": ["--model=llama3-8b", "--gpus=8", "--seq-len=131072"],
    "memory, on these GPUs": ["--model=llama3-405b", "--gpus=8", "--zero-stage=3", "--nvme-size=1GB"],
    "memory of a host": ["--model=llama3-8b", "--gpus=8", "--host-memory=64GB", "--offload-optimizer=cpu", "--zero-stage=1"],
    "memory of one rank, with ZeRO": ["--model=gpt3-6.7b", "--gpus=1", "--zero-stage=3", "--gradient-dtype=bf16", "--moments-dtype=bf16"],
    "a batch of few sequences": ["--model=llama3-8b", "--gpus=16", "--global-batch-tokens=65536", "--seq-len=8192"],
    "memory of a host that is not known": ["--model=llama3-8b", "--gpu=4090", "--gpus=1"],
    "memory, layer by layer": ["--model=llama3-8b", "--gpus=8", "--pipeline-parallel=4", "--pipeline-schedule=breadth-first", "--seq-len=8192", "--global-batch-tokens=4194304"],
    "passes of many stages": ["--model=gpt3-175b", "--gpus=96", "--pipeline-parallel=96", "--micro-batch-size=1", "--global-batch-tokens=1073741824"],
    "memory of a micro-batch": ["--model=llama3-8b", "--gpus=8", "--zero-stage=3", "--micro-batch-size=32", "--global-batch-tokens=4194304"],
}


@pytest.mark.parametrize("options", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_change_mends_what_a_run_breaks(options):
    made, status = plan(*options)
    rule = made["why_not"][0]
    assert status == 2 and made["command"] is None and rule["change"], made["why_not"]
    if "memory" not in rule["rule"]:
        assert made["memory"] is None
    mended, status = plan(*options, *rule["change"].split())
    assert status in (0, 3) and mended["why_not"] == [] and mended["command"], (rule, mended["why_not"])


@pytest.mark.parametrize("name, expected, changes_numbers", [
    ("memory, with a host beside it", "--offload-optimizer cpu", False), ("memory, in its formats", "--moments-dtype bf16", True),
    ("memory, for a long context", "--tensor-parallel 8 --sequence-parallel", False), ("memory, on these GPUs", "--gpus ", False)])
def test_what_is_changed_where_memory_lacks(name, expected, changes_numbers):
    """First what leaves the numbers of the training alone; formats are said to change them."""
    change = plan(*IMPOSSIBLE[name])[0]["why_not"][0]
    assert expected in change["change"] and change["changes_numbers"] == changes_numbers == ("-dtype " in change["change"])
    said = program.run("plan", *IMPOSSIBLE[name], check=False).stdout
    assert ("which changes the numbers" in " ".join(said.split())) == changes_numbers


@pytest.mark.parametrize("name", ["memory of one rank, with ZeRO", "memory of a host", "memory, layer by layer", "passes of many stages"])
def test_no_more_gpus_than_are_needed(name):
    """Where the host is too small, the state goes back to the GPUs; another schedule and other stages are tried."""
    change = plan(*IMPOSSIBLE[name])[0]["why_not"][0]["change"]
    assert "--gpus" not in change and "nvme" not in change and change.count("--micro-batch-size") == 1


def test_a_change_takes_nothing_that_is_not_known():
    """Where only the mesh has to change, the batch stays. Nothing is put into a host whose memory is not known."""
    batch = plan(*IMPOSSIBLE["a batch of few sequences"])[0]["why_not"][0]["change"]
    assert "--tensor-parallel" in batch and "--global-batch-tokens" not in batch
    assert "cpu" not in plan(*IMPOSSIBLE["memory of a host that is not known"])[0]["why_not"][0]["change"]


def test_the_fastest_change_is_given():
    """No run that a search of the same batch finds is faster, but for the 3% that bounds leave open."""
    options = ["--model=gpt2-xl", "--gpus=4", "--gpu=L4", "--global-batch-tokens=65536", "--seq-len=1024"]
    made, _ = plan(*options)
    mended, _ = plan(*options, *made["why_not"][0]["change"].split())
    searched, _ = plan(*options, "--search", "--reserve=1")
    assert mended["time"]["tokens_per_second"] == pytest.approx(searched["search"]["best"][0]["tokens_per_second"], rel=0.03)


def test_the_memory_that_is_left():
    """A plan leaves 1 GiB of a GPU, a search 2; --reserve as much as it says."""
    options = ["--model=gpt2", "--gpus=2", "--gpu-memory=6", "--global-batch-tokens=65536"]
    assert plan(*options)[0]["memory"]["usable"] == 5 * 2**30
    assert plan(*options, "--reserve=2.5")[0]["memory"]["usable"] == 3.5 * 2**30
    for given, left in ([], 2), (["--reserve=0.5"], 0.5), (["--reserve=4"], 4):
        best = plan(*options, "--search", *given)[0]["search"]["best"]
        assert best and all(run["bytes"] <= (6 - left) * 2**30 for run in best)
    for wrong, said in (["--reserve=6"], "leaves nothing"), (["--reserve=-1"], "number of GiB"), (["--reserve=nan"], "number of GiB"):
        refused = program.run("plan", *options, *wrong, check=False)
        assert refused.returncode == 1 and said in refused.stderr
    assert "leave it out" in program.run("plan", "--reserve=1", check=False).stderr


def test_the_nearest_split_of_layers():
    made, _ = plan("--gpus=4", "--layers=24", "--pipeline-parallel=4", "--pipeline-layers=8,0,8,8")
    assert made["why_not"][0]["change"] == "--pipeline-layers 7,1,8,8"


@pytest.mark.parametrize("options", [["--zero-stage=3", "--recompute=block"], ["--zero-stage=2", "--tensor-parallel=8", "--pipeline-parallel=16", "--recompute=block"],
                                     ["--tensor-parallel=8", "--sequence-parallel", "--zero-stage=1", "--micro-batch-size=1", "--pipeline-parallel=14",
                                      "--pipeline-schedule=interleaved", "--virtual-stages=9"],
                                     ["--pipeline-parallel=126", "--pipeline-schedule=zb-h1", "--zero-stage=1", "--recompute=block"]], ids=["fsdp", "3d", "interleaved", "deep"])
def test_large_plans_are_quick(options):
    """16,384 GPUs in two seconds of one processor; no process is started, and no time depends on their number."""
    start = os.times().children_user
    made, _ = plan("--model=llama3-405b", f"--gpus={16128 if '126' in ' '.join(options) or '14' in ' '.join(options) else 16384}", *options)
    assert made["memory"]["bytes"] > 2**30, made
    assert os.times().children_user - start < 2 * program.PATIENCE


def test_levers():
    """What the options would save is what their plans save; the largest sizes fit, and no larger ones."""
    base = ["--model=llama3-8b", "--gpus=8", "--zero-stage=1", "--global-batch-tokens=524288", "--micro-batch-size=4"]
    made, status = plan(*base, "--levers")
    levers, memory = made["levers"], made["memory"]
    assert status == 2 and not memory["fits"]
    for lever in levers["single"][:3] + levers["pairs"][:3]:
        with_it, _ = plan(*base, *lever["options"].split())
        assert with_it["memory"]["bytes"] == memory["bytes"] - lever["bytes_saved"]
        assert with_it["memory"]["fits"] == lever["fits"]
        assert with_it["time"]["expected_seconds"] == pytest.approx(made["time"]["expected_seconds"] + lever["seconds_lost"])
    assert plan(*base, *levers["first_fit"].split())[1] in (0, 3)
    micro_batches = made["batch"]["micro_batches"]

    def fits(tokens, sequences):
        return plan(*base, f"--seq-len={tokens}", f"--micro-batch-size={sequences}", f"--global-batch-tokens={8 * micro_batches * tokens * sequences}")[0]["memory"]["fits"]

    largest, longest = levers["micro_batch_sequences"], levers["context"]
    assert fits(2048, largest) and not fits(2048, largest + 1)
    assert fits(longest, 1) and not fits(longest + 64, 1)


def test_a_search_writes_its_run(tmp_path):
    """The file of the best run has the memory and the speed that the search found."""
    options = ["--model=gpt2", "--gpus=4", "--gpu-memory=4"]
    made, _ = plan(*options, "--search", f"--write-config={tmp_path}/best.toml")
    best = made["search"]["best"]
    assert 1 < len(best) <= 10 and made["search"]["simulated"] < made["search"]["considered"]
    assert [run["tokens_per_second"] for run in best] == sorted((run["tokens_per_second"] for run in best), reverse=True)
    again, status = plan(f"--config={tmp_path}/best.toml", *options[1:])
    assert status in (0, 3)
    assert again["memory"]["bytes"] == best[0]["bytes"] and again["time"]["tokens_per_second"] == pytest.approx(best[0]["tokens_per_second"])
    refused = program.run("plan", *options, f"--write-config={tmp_path}/best.toml", check=False)
    assert refused.returncode == 1 and "there is such a file" in refused.stderr


def test_a_search_without_a_fit_keeps_given_options():
    """No micro-batch of 3 sequences divides the batch."""
    made, status = plan("--model=gpt2", "--search", "--gpus=8", "--micro-batch-size=3", "--global-batch-tokens=524288")
    assert status == 2 and made["search"]["best"] == [] and made["memory"] is None
    assert "micro-batch" in made["why_not"][0]["rule"] + made["why_not"][0]["change"]


def test_the_fewest_gpus_in_time():
    options = ["--model=gpt2", "--tokens=200B", "--search"]
    made, _ = plan(*options, "--days=1")
    found = made["search"]["in_time"]
    assert made["cost"]["days"] <= 1 and made["mesh"]["processes"] == found["gpus"] > 1
    fewer, _ = plan(*options, f"--gpus={found['gpus'] - 1}")
    assert fewer["cost"]["days"] > 1
    assert made["search"]["fewest"]["gpus"] == 1


def test_a_search_of_several_gpus():
    made, _ = plan("--model=gpt2", "--search", "--gpu=A100,H100")
    assert {run["options"].split()[1] for run in made["search"]["best"]} <= {"A100", "H100"}
    dollars = [run["usd_per_billion_tokens"] for run in made["search"]["best"]]
    assert dollars == sorted(dollars)


@pytest.mark.parametrize("options, line", [
    (["--search", "--device=cpu"], "--search compares times, and those of CPUs are not known"),
    (["--search", "--gpus=8"], "--search compares runs of one batch; give --global-batch-tokens"),
    (["--search", "--parameters=70B"], "--search simulates runs of a model that this program trains"),
    (["--model=gpt2", "--search", "--days=3"], "--days is the time for --tokens"),
    (["--model=gpt2", "--search", "--days=3", "--tokens=1B", "--gpus=8"], "--days finds a number of GPUs; leave out --gpus"),
    (["--model=gpt2", "--tokens=1B", "--days=3"], "--days needs --search"),
    (["--model=gpt2", "--gpu=A100,H100"], "several GPUs are compared by --search"),
    (["--model=gpt2", "--gpu=A100,H100", "--search", "--price=3"], "--price is that of one GPU"),
    (["--model=gpt2", "--search", "--gpu=A100,Z100"], "--gpu Z100: unknown GPU"),
    (["--model=mixtral-8x7b", "--levers"], "--levers lists options of a model that this program trains"),
    (["--gpu="], "--gpu: the name is empty"),
    (["--model=gpt2", "--search", "--dtype=fp32", "--gpu=X", "--gpu-memory=40", "--gpu-tflops=100", "--gpu-bandwidth=900"], "those of fp32 on this GPU are not known"),
])
def test_searches_without_a_meaning(options, line):
    result = program.run("plan", *options, check=False)
    assert result.returncode == 1 and line in result.stderr and result.stderr.count("\n") == 1 and not result.stdout, result.stderr


@pytest.mark.parametrize("gpus", [8, 12, 48, 56, 88, 100, 2000, 3072, 16384])
def test_no_plan_refuses_the_batch_that_it_chose(gpus):
    """All data-parallel ranks share it, in many micro-batches if there are that many sequences; it is within a sixteenth of the published one."""
    mesh = [] if gpus <= 2000 else ["--tensor-parallel=8"]
    made, _ = plan("--model=llama3-8b", f"--gpus={gpus}", "--tokens=1T", "--zero-stage=3", "--recompute=block", *mesh)
    assert made["why_not"] == [] and made["memory"]["fits"] and made["model"]["sequence_length"] == 8192
    sequences = made["batch"]["tokens"] // 8192
    assert abs(sequences - 2048) <= 128 and sequences % made["mesh"]["data"] == 0
    assert "--seq-len=8192" in made["command"] and f"--global-batch-tokens={8192 * sequences}" in made["command"]
    if gpus in (8, 48):
        assert sequences == {8: 2048, 48: 1920}[gpus]


def test_what_is_published_is_named_or_taken():
    note = "the model was published with contexts of 8192 tokens: --seq-len 8192"
    assert note in program.run("plan", "--model=llama3-8b", "--gpus=8", check=False).stdout
    for options in (["--seq-len=8192"], ["--tokens=1T"], ["--search"]):
        result = program.run("plan", "--model=llama3-8b", "--gpus=8", "--zero-stage=3", "--recompute=block", *options)
        assert note not in result.stdout and "8192 tokens" in " ".join(result.stdout.split())
    assert plan("--model=llama3-8b", "--gpus=8", "--tokens=1T", "--seq-len=1024")[0]["model"]["sequence_length"] == 1024
    assert "was published" not in program.run("plan", "--model=gpt2", "--gpus=8").stdout


@pytest.mark.parametrize("options", [["--model=llama3-8b", "--gpus=4096"], ["--model=llama3-8b", "--gpus=3000"], ["--model=gpt2", "--gpus=3002"]])
def test_more_ranks_than_published_sequences(options):
    """Each has one."""
    made = plan(*options, "--tokens=1T", "--zero-stage=3")[0]
    assert made["why_not"] == [] and made["batch"]["tokens"] == made["mesh"]["data"] * made["model"]["sequence_length"]
    shared = plan("--model=gpt2", "--gpus=60", "--micro-batch-size=5", "--tokens=1T")[0]
    assert shared["why_not"] == [] and shared["batch"]["micro_batch_sequences"] == 5
    assert "a sequence for each data-parallel rank" in program.run("plan", *options, "--tokens=1T", "--zero-stage=3").stdout.replace("\n", " ")


def test_no_expectation_is_below_its_bound():
    time = plan("--model=llama3-8b", "--gpus=8", "--zero-stage=3", "--measured=x0.01")[0]["time"]
    assert time["expected_seconds"] == pytest.approx(time["bound_seconds"])


def test_a_picture_that_ends_early_says_so():
    options = ["--model=gpt2", "--layers=16", "--gpus=4", "--pipeline-parallel=4", "--micro-batch-size=1"]
    printed = " ".join(program.run("plan", *options, "--global-batch-tokens=1048576").stdout.split())
    assert "The picture ends after 10 of the step's 1,024 micro-batches, and the bubble is the step's" in printed
    assert "The picture ends" not in program.run("plan", *options, "--global-batch-tokens=10240").stdout


def test_twelve_gpus_are_a_machine_and_a_half():
    made, _ = plan("--model=gpt2", "--gpus=12", "--tensor-parallel=4", "--zero-stage=1", "--global-batch-tokens=12288")
    assert made["sends"]["links"]["tensor"] == "node" and made["sends"]["links"]["inside"] == "network"
    assert "--map-by ppr:8:node" in made["command"]
    printed = " ".join(program.run("plan", "--model=gpt2", "--gpus=12", "--global-batch-tokens=12288").stdout.split())
    assert "2 machines, 8 GPUs on each (4 on the last)" in printed
    halves, _ = plan("--model=gpt2", "--gpus=12", "--nodes=2", "--tensor-parallel=4", "--zero-stage=1", "--global-batch-tokens=12288")
    assert halves["sends"]["links"]["tensor"] == "network" and "ppr:6:node" in halves["command"]
    # What crosses the network takes the time of the network.
    assert halves["time"]["parts"]["tensor_exchanges"] > 2 * made["time"]["parts"]["tensor_exchanges"]


def test_an_interleaved_run_that_does_not_fit_has_a_remedy():
    made, status = plan("--model=llama3-70b", "--gpus=8", "--pipeline-parallel=8", "--virtual-stages=2")
    assert status == 2 and made["why_not"][0]["rule"] == "memory of a rank"


@pytest.mark.parametrize("options, line", [
    (["--lost=nan", "--tokens=1T"], "--lost 'nan' is not a share in percent"), (["--gpu-memory=1e12"], "--gpu-memory: '1e12' is not GiB of one GPU, such as 79.2"),
    (["--host-memory=512"], "--host-memory: '512' is not a size with its unit, such as 512GB"), (["--gpu-bandwidth=inf"], "--gpu-bandwidth: 'inf' is not"),
    (["--memory-convention=mixed-12", "--convention-activations=-5GB"], "--convention-activations: unknown value '-5GB'")])
def test_numbers_without_a_meaning(options, line):
    assert line in refusal("--model=gpt2", "--gpus=8", *options)


def test_a_described_model_that_is_too_large_does_not_fit():
    made, status = plan("--model=deepseek-v3", "--gpus=8")
    assert status == 2 and made["why_not"][0]["rule"] == "memory of a rank" and "--zero-stage 3" in made["why_not"][0]["change"]
    assert plan("--model=deepseek-v3", *made["why_not"][0]["change"].split())[1] == 0


CONFIGS = {
    "mixtral-8x7b": {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                     "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False, "max_position_embeddings": 32768},
    "deepseek-v3": {"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
                    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 3,
                    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8}}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_described_as_its_name_is(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    options = ["--gpus=256", "--memory-convention=mixed-12", "--zero-stage=3"]
    made, named = (plan(f"--model={model}", *options)[0] for model in (tmp_path, name))
    assert made["model"] == named["model"] and made["convention"] == named["convention"]
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[name], "num_experts_per_tok": "2"}))
    assert "--model: the num_experts_per_tok in '" in refusal(f"--model={tmp_path}", *options)


def test_offload_by_a_convention():
    """Adam's 560 GB for four GPUs: each rank's quarter, the host's lack, and the disk that mends it. Weights go the same way."""
    options = ["--parameters=70B", "--memory-convention=mixed-12", "--gpus=4", "--zero-stage=3", "--host-memory=512GB"]
    made, status = plan(*options, "--offload-optimizer=cpu")
    assert status == 2 and not made["convention"]["fits"]
    assert made["why_not"] == [{"rule": "host memory of a rank", "value": 140 * 10**9, "limit": 128 * 10**9, "change": "--offload-optimizer nvme --nvme-dir DIR",
                                "changes_numbers": False}]
    mended, status = plan(*options, "--offload-optimizer=cpu", *made["why_not"][0]["change"].split(), "--nvme-size=2TB")
    assert status == 0 and mended["why_not"] == [] and mended["convention"]["disk"] == {"gb": 560, "left_gb": 1440}
    assert mended["convention"]["host"] == {"gb": 0, "left_gb": 512}
    both, _ = plan(*options, "--offload-optimizer=nvme", "--offload-parameters=cpu")
    kept = both["convention"]["per_gpu"]
    assert (kept["weights_gb"], kept["gradients_gb"], kept["optimizer_gb"], both["convention"]["host"]["gb"]) == (0, 35, 0, 140)
    assert both["convention"]["least_gpus"] == 2  # for 140 GB of gradients
    small, status = plan(*options, "--offload-optimizer=nvme", "--nvme-size=500GB")
    assert status == 2 and small["why_not"][0]["rule"] == "disk of a rank"
    assert plan(*options[:3], "--offload-optimizer=cpu")[0]["convention"]["per_gpu"]["optimizer_gb"] == 0
    printed = " ".join(program.run("plan", *options, "--offload-optimizer=cpu", check=False).stdout.split())
    assert "; 560 GB in the host's memory of a machine, which lacks 48 GB" in printed


def test_activations_by_layer():
    """Of described models too, and in the format of the convention's weights."""
    options = ["--memory-convention=mixed-12", "--convention-activations=by-layer"]
    assert plan("--model=mixtral-8x7b", *options)[0]["convention"]["activation_bytes_of_layer"] == 4 * 8192 * 4096 * 2
    assert plan("--model=gpt2", *options, "--memory-convention=fp32-16", "--micro-batch-size=3")[0]["convention"]["activation_bytes_of_layer"] == 4 * 3 * 1024 * 768 * 4
    printed = " ".join(program.run("plan", "--model=llama2-7b", "--seq-len=2048", "--memory-convention=mixed-12", *options[1:], check=False).stdout.split())
    assert "+ 2.147 of activations" in printed and "with 64.0 MiB of activations a layer" in printed


@pytest.mark.parametrize("options, line", [
    (["--parameters=70B", "--gpus=4", "--offload-optimizer=cpu"], "--offload-optimizer without a model that this program trains is planned by another --memory-convention; give one"),
    (["--model=mixtral-8x7b", "--gpus=4", "--offload-parameters=cpu", "--memory-convention=accelerate"], "--offload-parameters without a model"),
    (["--parameters=70B", "--convention-activations=by-layer"], "--convention-activations by-layer needs the layers and channels of a model"),
    (["--model=gpt2", "--convention-activations=by-layers"], "--convention-activations: unknown value 'by-layers'"),
])
def test_conventions_without_a_meaning(options, line):
    result = program.run("plan", *options, check=False)
    assert result.returncode == 1 and line in result.stderr and result.stderr.count("\n") == 1 and not result.stdout, result.stderr


def test_json_has_notes_apart():
    result = program.run("plan", "--gpus=64", "--json", check=False)
    json.loads(result.stdout)
    assert "note: --gpu was not given: planned for H100" in result.stderr


@pytest.mark.parametrize("options, key, figure", [row for row in planned.rows_of_pages() if "--search" not in row[0]], ids=lambda value: value if value.startswith("-") else None)
def test_the_figures_of_the_page(options, key, figure):
    planned.check_row(options, key, figure)


def test_the_page_has_rows():
    assert len(planned.rows_of_pages()) > 100


def test_the_bytes_sent_of_the_page():
    """docs/parallelism.md, in whole MB. (The suites mpi-* count what ranks send, and compare it with the lists that plans add up.)"""
    page = (program.ROOT / "docs/parallelism.md").read_text()
    rows = [list(map(int, row)) for row in re.findall(r"^\|" + r" (\d+) \|" * 7 + "$", page, re.MULTILINE)]
    assert [row[0] for row in rows] == [0, 1, 2, 3]
    for stage, *sent in rows:
        for figure, (every, m) in zip(sent, itertools.product(("step", "micro-batch"), (1, 2, 8)), strict=True):
            planned = plan("--model=gpt2", "--gpus=4", "--dtype=bf16", "--micro-batch-size=1", f"--global-batch-tokens={4 * 1024 * m}",
                           f"--zero-stage={stage}", f"--reduce-every={every}")[0]
            assert round(planned["sends"]["bytes"] / 1e6) == figure
            W, G, f = 2 * 124439808, 4 * 124439808, 3 / 4
            w = 2 * (50257 * 768 + 1024 * 768 + 12 * 768**2 + 13 * 768 + 2 * 768)  # embeddings, a block, the last layernorm
            r = m if every == "micro-batch" else 1
            exact = [(r + 1) * G * f, (r * G + W) * f, (r * G + W) * f, (r * G + m * (2 * W - w)) * f][stage]
            # The padding, 47 rows of the table, and up to a block of 1,024 for each of 4 ranks and 15 units, is 8e-4 of W and of G. At
            # stage 3 W counts twice, and w has most of it: at most 1e-3 of 2 W - w.
            assert planned["sends"]["bytes"] == pytest.approx(exact, rel=1e-3)


@pytest.mark.more
def test_published_steps():
    """The page has what scripts/plan_error.py prints. The factors are those that a fit of the same steps leaves as they are, and the
    quantiles theirs."""
    def printed(*options):
        return subprocess.run([sys.executable, "scripts/plan_error.py", *options], cwd=program.ROOT, capture_output=True, text=True, check=True).stdout

    page = (program.ROOT / "docs/planner.md").read_text()
    for part in printed().strip().split("\n\n"):
        assert part in page, "put what scripts/plan_error.py prints into docs/planner.md"
    *lines, unseen = printed("--fit").splitlines()
    table = (program.ROOT / "llmc/planner/published_times.cpp").read_text()

    def numbers(text):
        return [float(x) for x in re.findall(r"\d+\.\d+|\b\d+\b", text)]

    for line in lines:
        [written] = [other for other in table.splitlines() if other.split(", ")[:2] == line.split(", ")[:2] and
                     ("Steps" not in line or other.split(", ")[2] == line.split(", ")[2])]
        assert numbers(written) == pytest.approx(numbers(line), rel=0.02), "put what scripts/plan_error.py --fit prints there"
    assert unseen.replace("unseen steps: ", "") in page


def refusal(*options):
    result = program.run("plan", *options, check=False)
    assert result.returncode == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and not result.stdout
    return result.stderr


PARTS = ["products", "attention", "other_operations", "tensor_exchanges", "recomputation", "update", "waits_for_data_exchanges", "waits_for_stages",
         "waits_for_host", "waits_for_disk"]


@pytest.mark.parametrize("options, parts, largest", [
    ([], "products attention other_operations update", "products"),
    (["--gpus=4", "--tensor-parallel=4", "--recompute=block"], "tensor_exchanges recomputation", None),
    (["--gpus=16", "--zero-stage=3", "--reduce-every=micro-batch", "--network=1"], "waits_for_data_exchanges", "waits_for_data_exchanges"),
    (["--gpus=8", "--pipeline-parallel=8", "--micro-batch-size=1"], "waits_for_stages", None),
    (["--offload-optimizer=cpu", "--gpu=4090"], "waits_for_host", None),
    (["--offload-optimizer=nvme", "--nvme-dir=DIR", "--nvme-speed=0.1,0.1"], "waits_for_disk", "waits_for_disk")])
def test_what_a_step_consists_of(options, parts, largest):
    options = ["--model=gpt2-large", "--gpus=1", "--global-batch-tokens=65536", *options]
    time = plan(*options)[0]["time"]
    assert list(time["parts"]) == PARTS
    assert sum(time["parts"].values()) == pytest.approx(time["expected_seconds"], rel=1e-9)
    assert time["bound_seconds"] <= time["expected_seconds"]
    for part in parts.split():
        assert time["parts"][part] > 0
    for part in ["tensor_exchanges", "recomputation", *PARTS[6:]]:
        assert time["parts"][part] == 0 or options[3:], part
    if largest:
        assert max(time["parts"], key=time["parts"].get) == largest


@pytest.mark.parametrize("options, steps", [
    (["--gpu=A100"], "on Ampere in 16 bits, data-parallel alone"), (["--gpu=h100", "--network=25"], "on Hopper in 16 bits, data-parallel alone"),
    (["--gpu=H200", "--gpus=2", "--tensor-parallel=2"], "on Hopper in 16 bits, on other meshes"), (["--dtype=fp16"], "on Hopper in 16 bits, data-parallel alone"),
    (["--fp8=delayed"], "on Hopper in fp8, data-parallel alone"), (["--fp8=delayed", "--gpus=2", "--pipeline-parallel=2"], "on Hopper in fp8"),
    (["--dtype=fp32"], "on Hopper"), (["--gpu=B200"], "on Blackwell in 16 bits"), (["--gpu=B200", "--gpus=2", "--tensor-parallel=2"], "on Blackwell in 16 bits, on other meshes"),
    (["--gpu=4090"], None), (["--gpu=5090"], None), (["--measured=0.5"], None)])
def test_the_range_is_that_of_published_steps_of_the_kind(options, steps):
    options = ["--model=gpt2", "--gpus=1", *options]
    time = plan(*options)[0]["time"]
    text = " ".join(program.run("plan", *options).stdout.split())
    if steps is None:
        assert time["low_seconds"] is time["high_seconds"] is time["range_of"] is None and "in 80% of" not in text
        return
    count, of = time["range_of"].split(" published steps ")
    assert of == steps and int(count) >= 5 and f" in 80% of {time['range_of']};" in text
    assert 0.5 * time["expected_seconds"] < time["low_seconds"] < time["expected_seconds"] < time["high_seconds"] < 1.5 * time["expected_seconds"]


def test_measured_steps_scale_times(tmp_path):
    options = ["--model=gpt2", "--gpus=8"]
    planned = plan(*options)[0]["time"]
    seconds = 1.25 * planned["expected_seconds"]
    for measured in (f"{seconds}", "x1.25"):
        time = plan(*options, f"--measured={measured}")[0]["time"]
        assert time["expected_seconds"] == pytest.approx(seconds) and time["bound_seconds"] == planned["bound_seconds"]
        assert sum(time["parts"].values()) == pytest.approx(seconds)
    # A run's folder: its options, its processes, its median step.
    (tmp_path / "config.toml").write_text('model = "gpt2"\nglobal-batch-tokens = 16384\n')
    own = plan("--model=gpt2", "--gpus=2", "--global-batch-tokens=16384")[0]["time"]["expected_seconds"]
    lines = [{"run": {"mesh": {"world": 2}, "device": "NVIDIA H100 80GB HBM3, 79.2 GiB, CUDA 13.0 (driver for 13.0), flash attention"}}, *({"step_ms": own * 1e3 * factor} for factor in (9, 1.4, 1.5, 1.6, 0.1))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = program.run("plan", *options, f"--measured={tmp_path}")
    assert "--measured: the median of 5 steps, " in result.stdout and "is 1.5 times" in result.stdout
    found = plan("--model=llama3-8b", "--gpus=8", "--zero-stage=3", "--levers", f"--measured={tmp_path}")[0]
    same = plan("--model=llama3-8b", "--gpus=8", "--zero-stage=3", "--levers")[0]
    assert found["time"]["expected_seconds"] == pytest.approx(1.5 * same["time"]["expected_seconds"])
    for lever, other in zip(found["levers"]["single"], same["levers"]["single"], strict=True):
        assert lever["options"] == other["options"] and lever["seconds_lost"] == pytest.approx(1.5 * other["seconds_lost"], abs=1e-9)
    best, other = (plan("--model=llama3-8b", "--gpus=8", "--zero-stage=3", "--micro-batch-size=1", "--search", *more)[0]["search"]["best"][0]
                   for more in ([f"--measured={tmp_path}"], []))
    assert best["tokens_per_second"] == pytest.approx(other["tokens_per_second"] / 1.5)


@pytest.mark.parametrize("measured, says", [
    ("nothing", "--measured nothing: there is no nothing/metrics.jsonl; give the folder of a run, the seconds of a step, or a ratio such as x1.2"),
    ("x1.1 --speed=100 --tokens=1B", "--measured corrects times, which --speed replaces"), ("-3", "--measured -3: there is no -3/metrics.jsonl"), ("xnan", "--measured xnan: there is no xnan/metrics.jsonl"), ("0", "--measured 0: there is no"),
    ("1e-9", "is faster than the"), ("60 --gpu-memory=2", "breaks a rule (memory of a rank)"), ("60 --gpu-memory=2.5 --search", "breaks a rule (memory of a rank)")])
def test_what_measures_nothing_is_refused(measured, says):
    assert says in refusal("--model=gpt2", "--gpus=8", *f"--measured={measured}".split())


@pytest.mark.parametrize("lines, says", [
    ([], "has no step"), (['{"run": {"mesh": {"world": 1}, "device": "AMD EPYC, 4 threads"}}', '{"step_ms": 3}'], "it ran on CPUs (AMD EPYC, 4 threads), whose times are not planned"),
    (['{"run": {"mesh": {"world": 1}, "device": "NVIDIA X9, 9 GiB, CUDA 13.0"}}', '{"step_ms": 3}'], "it ran on NVIDIA X9, 9 GiB, CUDA 13.0, which is no GPU that plans know"),
    (['{"run": {"mesh": {"world": 1}, "device": "NVIDIA H100, CUDA 13.0"}}', '{"step_ms": 3}', '{"step'], "is damaged after 1 step;")])
def test_a_run_that_measures_nothing_is_refused(tmp_path, lines, says):
    (tmp_path / "config.toml").write_text('model = "gpt2"\n')
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert says in refusal("--model=gpt2", "--gpus=8", f"--measured={tmp_path}")
