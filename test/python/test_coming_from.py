"""./train_gpt plan --from FILE (docs/coming-from.md)."""

import json
import re

import program
import pytest
from planned import plan

PAGE = (program.ROOT / "docs/coming-from.md").read_text()
MODEL = ["--model=llama2-7b", "--seq-len=2048"]

# The configurations below are as the projects' own pages and templates show them.
ZERO_3_WITH_OFFLOAD = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4, "fast_init": False},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True},
}
ALL_AUTO = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "allgather_partitions": True, "allgather_bucket_size": 2e8,
                          "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": "auto", "contiguous_gradients": True},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
FSDP_YAML = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
DEEPSPEED_YAML = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
fsdp_config: {}
mixed_precision: fp16
num_machines: 1
num_processes: 8
use_cpu: false
"""


def write(folder, name, contents):
    path = folder / name
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents, indent=2))
    return path


def printed(path, *options):
    """The options that were taken from the file, its notes, and the plan with its status."""
    result = program.run("plan", f"--from={path}", *options, "--json", check=False)
    assert result.returncode in (0, 2, 3), result.stderr
    notes = [line.removeprefix(f"note: {path}: ") for line in result.stderr.splitlines() if line.startswith(f"note: {path}: ")]
    taken = [note.removeprefix("gives ").split() for note in notes if note.startswith("gives ")]
    return {*taken[0]} if taken else set(), notes, json.loads(result.stdout)


def same_plan(made, *options):
    """Whether a command line of our own options has the same plan, but for the command that starts it."""
    other = plan(*options)[0]
    return {**made, "command": None} == {**other, "command": None}


def test_a_deepspeed_configuration(tmp_path):
    path = write(tmp_path, "ds.json", {**ZERO_3_WITH_OFFLOAD, "made_up": 1, "my_section": {"a": {"b": 1}}})
    taken, notes, made = printed(path, *MODEL, "--gpus=8")
    ours = ["--global-batch-tokens=131072", "--micro-batch-size=2", "--grad-clip=1", "--log-every=2000", "--dtype=bf16", "--lr=3e-05", "--beta1=0.8", "--beta2=0.999",
            "--eps=1e-08", "--weight-decay=3e-07", "--lr-schedule=constant", "--warmup-steps=500", "--zero-stage=3", "--offload-optimizer=nvme",
            "--nvme-dir=/local_nvme", "--offload-parameters=cpu", "--overlap-grad-reduce=true"]
    assert taken == set(ours)
    assert made["batch"] == {"tokens": 64 * 2048, "micro_batch_sequences": 2, "micro_batches": 4}
    assert same_plan(made, *MODEL, "--gpus=8", *ours)
    ignored = dict(re.fullmatch(r"ignored: (.*) \((.*)\)", note).groups()[::-1] for note in notes if note.startswith("ignored"))
    assert ignored["the plan sizes its buffers"] == ", ".join(f"zero_optimization.{key}" for key in (
        "sub_group_size", "reduce_bucket_size", "allgather_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"))
    assert ignored["what is offloaded moves in pieces of one size"].endswith("aio.thread_count, aio.single_submit, aio.overlap_events")
    assert "unknown keys: made_up, my_section" in notes
    assert not [note for note in notes if "fp16" in note]  # it is not enabled
    text = program.run("plan", f"--from={path}", *MODEL, "--gpus=8", check=False).stdout
    assert "note: " in text and "--offload-optimizer=nvme" in " ".join(text.split("start with")[1].split("note:")[0].split())


def test_auto_is_left_to_our_defaults(tmp_path):
    path = write(tmp_path, "auto.json", ALL_AUTO)
    taken, notes, made = printed(path, *MODEL, "--gpus=8")
    assert taken == {"--lr-schedule=linear", "--min-lr-fraction=0", "--zero-stage=2", "--offload-optimizer=cpu", "--overlap-grad-reduce=true"}
    [automatic] = [note for note in notes if "auto" in note]
    assert automatic.startswith("kept at our defaults, since the value is auto: fp16.enabled, bf16.enabled, optimizer.params.lr, ")
    assert automatic.endswith(", gradient_accumulation_steps, gradient_clipping, train_batch_size, train_micro_batch_size_per_gpu")
    # The settings of the loss scale need fp16, which is open: a plan on GPUs takes bf16.
    assert "ignored: fp16.initial_scale_power (--initial-loss-scale needs --dtype fp16)" in notes
    assert same_plan(made, *MODEL, "--gpus=8", *taken)
    taken, _, _ = printed(path, *MODEL, "--gpus=8", "--dtype=fp16")
    assert {"--initial-loss-scale=65536", "--loss-scale-window=1000", "--loss-scale-hysteresis=2"} < taken


def test_accelerate_with_fsdp(tmp_path):
    path = write(tmp_path, "fsdp.yaml", FSDP_YAML)
    taken, notes, made = printed(path, *MODEL)
    assert taken == {"--gpus=16", "--nodes=2", "--dtype=bf16", "--zero-stage=HYBRID_SHARD", "--recompute=block"}
    assert (made["mesh"]["shards"], made["mesh"]["replicas"]) == (8, 2)
    assert "ignored: fsdp_config.fsdp_state_dict_type (checkpoints have one format here)" in notes
    # The groups of a machine are written as their size.
    program.run("plan", f"--from={path}", *MODEL, f"--write-config={tmp_path}/run.toml", check=False)
    again = plan(f"--config={tmp_path}/run.toml", "--gpus=16", "--nodes=1")[0]
    assert again["mesh"] == made["mesh"]


def test_accelerate_with_deepspeed(tmp_path):
    path = write(tmp_path, "deepspeed.yaml", DEEPSPEED_YAML)
    taken, notes, made = printed(path, *MODEL, "--micro-batch-size=1")
    assert taken == {"--gpus=8", "--nodes=1", "--dtype=fp16", "--zero-stage=3", "--offload-optimizer=cpu", "--grad-clip=0.5", f"--global-batch-tokens={4 * 8 * 2048}"}
    assert made["mesh"]["zero_stage"] == 3 and made["batch"]["micro_batches"] == 4
    _, notes, _ = printed(path, *MODEL)
    assert any("an accumulation of 4 micro-batches needs the size of a micro-batch" in note for note in notes)
    _, notes, _ = printed(path, *MODEL, "--global-batch-tokens=16384")
    assert "the accumulation of micro-batches is ignored: it follows from --global-batch-tokens" in notes


def test_accelerate_names_a_file_of_deepspeed(tmp_path):
    """Beside it, or where the program starts; the format of numbers is that of Accelerate."""
    write(tmp_path, "zero3.json", {**ALL_AUTO, "zero_optimization": {"stage": 3}, "activation_checkpointing": {"cpu_checkpointing": True}})
    path = write(tmp_path, "with_file.yaml", "distributed_type: DEEPSPEED\nmixed_precision: 'no'\nnum_processes: 4\ndeepspeed_config: {deepspeed_config_file: zero3.json}\n")
    taken, notes, _ = printed(path, *MODEL)
    assert {"--zero-stage=3", "--dtype=fp32", "--gpus=4", "--recompute=block"} < taken
    assert any(note.startswith("activation_checkpointing says how") for note in notes)
    other = write(tmp_path, "multi.yaml", "distributed_type: MULTI_GPU\nnum_processes: 4\ndeepspeed_config: {deepspeed_config_file: nowhere.json}\n")
    taken, notes, _ = printed(other, *MODEL)
    assert taken == {"--gpus=4"} and "ignored: deepspeed_config (distributed_type is MULTI_GPU)" in notes


def test_the_command_line_wins(tmp_path):
    path = write(tmp_path, "ds.json", {**ZERO_3_WITH_OFFLOAD, "fp16": {"enabled": True, "loss_scale": 128}, "bf16": {"enabled": False}})
    options = ["--gpus=4", "--zero-stage=1", "--offload-optimizer=cpu", "--lr=0.1", "--loss-scale-window=7", "--global-batch-tokens=16384"]
    taken, notes, made = printed(path, *MODEL, *options)
    assert {"--dtype=fp16", "--offload-parameters=cpu"} < taken
    assert not {option.split("=")[0] for option in taken} & {"--zero-stage", "--offload-optimizer", "--lr", "--loss-scale", "--nvme-dir", "--global-batch-tokens"}
    assert made["mesh"]["zero_stage"] == 1 and made["batch"]["tokens"] == 16384
    of_bf16 = write(tmp_path, "bf16.json", {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}})
    assert printed(of_bf16, *MODEL, "--gpus=8", "--dtype=fp16")[0] == {"--moments-dtype=bf16"}
    assert {"--master-dtype=none", "--gradient-dtype=bf16"} < printed(of_bf16, *MODEL, "--gpus=8", "--dtype", "bf16")[0]
    yaml = write(tmp_path, "fsdp.yaml", FSDP_YAML)
    taken, _, made = printed(yaml, *MODEL, "--processes=64", "--gpu=A100", "--precision=fp32")
    assert made["mesh"]["processes"] == 64 and not {"--gpus=16", "--nodes=2", "--dtype=bf16"} & taken


def test_batches_that_disagree(tmp_path):
    """Their batch counts; a file for 8 GPUs can be planned for others."""
    path = write(tmp_path, "ds.json", ZERO_3_WITH_OFFLOAD)
    taken, notes, made = printed(path, *MODEL, "--gpus=4")
    assert made["batch"] == {"tokens": 64 * 2048, "micro_batch_sequences": 2, "micro_batches": 8}
    assert any("train_batch_size 64 is not 2 sequences a micro-batch x 4 micro-batches x 4 data-parallel ranks" in note for note in notes)
    alone = write(tmp_path, "alone.json", {"train_batch_size": 64, "gradient_accumulation_steps": 4})
    assert printed(alone, *MODEL, "--gpus=8", "--tensor-parallel=2")[2]["batch"] == {"tokens": 64 * 2048, "micro_batch_sequences": 4, "micro_batches": 4}


def test_a_run_reads_what_was_written(tmp_path):
    """With a tiny model: the plan of the written file, and a run of it."""
    path = write(tmp_path, "ds.json", {**ZERO_3_WITH_OFFLOAD, "zero_optimization": {**ZERO_3_WITH_OFFLOAD["zero_optimization"], "offload_optimizer": {"device": "cpu"}}})
    toml = tmp_path / "run.toml"
    sizes = ["--layers=2", "--heads=4", "--channels=32", "--seq-len=16", "--processes=2", "--device=cpu", "--host-memory=8GB"]
    made, status = plan(f"--from={path}", *sizes, "--steps=2", f"--write-config={toml}")
    assert status == 0 and made["batch"] == {"tokens": 64 * 16, "micro_batch_sequences": 2, "micro_batches": 16}
    again = plan(f"--config={toml}", "--processes=2", "--host-memory=8GB")[0]
    assert {**again, "command": None} == {**made, "command": None}
    run = program.train(tmp_path / "run", f"--config={toml}", "--warmup-steps=1", "--val-every=0", "--sample-tokens=0", ranks=2)
    configuration = run.record["configuration"]
    assert (configuration["zero-stage"], configuration["dtype"], configuration["offload-parameters"], configuration["weight-decay"]) == (3, "bf16", "cpu", 3e-7)


def test_a_search_keeps_the_options_of_the_file(tmp_path):
    path = write(tmp_path, "ds.json", {"train_batch_size": 32, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    _, _, made = printed(path, "--model=gpt2", "--gpus=4", "--search")
    assert made["mesh"]["zero_stage"] == 2 and made["batch"]["tokens"] == 32 * 1024 and made["search"]["considered"] > 0
    assert program.run("--print-model", f"--from={path}", "--model=gpt2").stdout.count("ds.json: gives") == 1


# ---- The page

def rows(program_name):
    """(key, value, our options) of a table of the page."""
    table = PAGE.split(f"\n## {program_name}\n", 1)[1].split("\n## ")[0]
    found = re.findall(r"^\| `([\w.]+)`: (.+?) \| (?:`([^`]+)` )?\|", table, re.MULTILINE)
    return [(key, json.loads(value), options) for key, value, options in found]


def tree_of(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def merged(a, b):
    """b wins."""
    return {**a, **b, **{key: merged(a[key], b[key]) for key in a.keys() & b.keys() if isinstance(a[key], dict)}}


# What a key needs beside it.
BESIDE = {
    "fp16.": {"fp16": {"enabled": True}}, "bf16.": {"bf16": {"enabled": True}}, "torch_autocast.": {"torch_autocast": {"enabled": True}},
    "zero_optimization.mics": {"zero_optimization": {"stage": 3}},
    "zero_optimization.offload_optimizer.nvme": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
    "zero_optimization.offload_param.nvme": {"zero_optimization": {"offload_param": {"device": "nvme"}}},
    "optimizer.params.momentum": {"optimizer": {"type": "SGD"}}, "optimizer.params.nesterov": {"optimizer": {"type": "SGD"}},
    "optimizer.params.muon_lr": {"optimizer": {"type": "Muon"}},
    "deepspeed_config.": {"distributed_type": "DEEPSPEED"}, "fsdp_config.": {"distributed_type": "FSDP"}, "megatron_lm_config.": {"distributed_type": "MEGATRON_LM"},
    "deepspeed_config.offload_optimizer_nvme": {"deepspeed_config": {"offload_optimizer_device": "nvme"}},
    "deepspeed_config.offload_param_nvme": {"deepspeed_config": {"offload_param_device": "nvme"}},
    "megatron_lm_config.megatron_lm_sequence": {"megatron_lm_config": {"megatron_lm_tp_degree": 2}},
    "fp8_config.": {"mixed_precision": "fp8"}, "parallelism_config.parallelism_config_dp": {"distributed_type": "FSDP"},
}


@pytest.mark.parametrize("program_name, key, value, options", [(name, *row) for name in ("DeepSpeed", "Accelerate") for row in rows(name)])
def test_the_rows_of_the_page(tmp_path, program_name, key, value, options):
    write(tmp_path, "ds.json", {"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}})
    tree = tree_of(key, value)
    for beginning, more in BESIDE.items():
        if key.startswith(beginning):
            tree = merged(more, tree)
    # An Accelerate file has a number of processes. A DeepSpeed file without a format of numbers means fp32.
    more, mesh, name = ({"num_processes": 8}, [], "file.yaml") if program_name == "Accelerate" else ({"bf16": {"enabled": "auto"}}, ["--gpus=8"], "file.json")
    path = write(tmp_path, name, merged(more, tree))
    taken, _, _ = printed(path, *MODEL, *mesh)
    assert taken - {"--gpus=8", "--processes=8"} == {word.replace(" ", "=") for word in re.split(r" (?=--)", options) if word}


def test_the_page_has_every_key():
    """Those that become an option."""
    for name, file in [("DeepSpeed", "deepspeed_keys.cpp"), ("Accelerate", "accelerate_keys.cpp")]:
        source = re.sub(r"\s+", " ", (program.ROOT / "llmc/planner" / file).read_text())
        keys = {key for key, kind in re.findall(r'ForeignKey\{"([\w.]+)", (\w+)', source) if kind != "ignored"}
        others = {"zero_optimization", "zero_optimization.cpu_offload_params", "fp8_config.amax_history_length", "tensor_parallel.tp_size", "tensor_parallel.tp.tp_size",
                  "tensor_parallel.tensor_parallel.tp_size"}  # in remarks, or of old files
        assert len(keys) > 20 and keys - others == {key for key, _, _ in rows(name)} - {"activation_checkpointing.partition_activations"}


# ---- Files that are none

ALIASES = "zero_stage: &a0 [1, 1]\n" + "".join(f"k{i}: &a{i} [{', '.join(3 * [f'*a{i - 1}'])}]\n" for i in range(1, 30))


REFUSED = [
    ("x.json", "", "it is empty; give a configuration of DeepSpeed or Accelerate"),
    ("x.yaml", " \n", "it is empty"),
    ("x.json", '{"train_batch_size": ', "parse error at line 1, column 22"),
    ("x.json", "[1, 2]", "it has no keys"),
    ("x.json", "{}", "it has no keys"),
    ("x.yaml", "a: [1, 2\nb: }", "line 2: "),
    ("x.yaml", "just text", "it has no keys"),
    ("x.yaml", 100000 * "[", "it has more than 32 levels"),
    ("x.json", 40000 * '{"zero_optimization":', "it has more than 32 levels"),
    ("x.yaml", ALIASES, "it has more than 10000 values"),
    ("x.yaml", "num_processes: &x\n- *x\n", "it has more than 32 levels"),
    ("x.yaml", "num_processes: 2\n---\nnum_processes: 4\n", "it has 2 documents; give one"),
    ("x.yaml", "num_processes: 2\nnum_processes: 4\n", "'num_processes' is given twice; leave one out"),
    ("x.yaml", "? [a]\n: b\n", "it has a key that is not a text"),
    ("x.json", '{"train_batch_size": 4, "train_batch_size": 5}', "'train_batch_size' is given twice; leave one out"),
    ("x.json", 2**20 * " " + "{}", "it has 1048578 bytes; a configuration has 1048576 at most"),
    ("x.json", '{"hello": 1}', "it has no key of DeepSpeed's or Accelerate's configurations; its first is 'hello'"),
    ("x.json", {"zero_optimization": {"stage": 5}}, "zero_optimization.stage: --zero-stage 5 is out of range; give 0 to 3"),
    ("x.json", {"zero_optimization": {"stage": "three"}}, 'zero_optimization.stage is "three"; give a whole number'),
    ("x.json", {"zero_optimization": {"offload_param": {"device": "gpu"}}}, 'zero_optimization.offload_param.device is "gpu"; give one of: none, cpu, nvme'),
    ("x.json", {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "zero_optimization.offload_optimizer.device: --offload-optimizer nvme needs the disk's directory; add --nvme-dir DIR"),
    ("x.json", {"optimizer": {"params": {"lr": -3}}}, "optimizer.params.lr: --lr -3 is out of range"),
    ("x.json", {"optimizer": {"params": {"betas": [0.9]}}}, "optimizer.params.betas is [0.9]; give a list of two numbers"),
    ("x.json", {"train_batch_size": 2.5}, "train_batch_size is 2.5; give a whole number of 1 or more"),
    ("x.json", {"train_batch_size": {"a": 1}}, "train_batch_size is a section; give a value"),
    ("x.json", {"fp16": True}, "fp16 is true; give a section"),
    ("x.json", {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled ask for different values of --dtype; leave one out"),
    ("x.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HALF_SHARD}\n", 'fsdp_config.fsdp_sharding_strategy is "HALF_SHARD"; give one of: FULL_SHARD, 1, '),
    ("x.yaml", "mixed_precision: bf17\n", 'mixed_precision is "bf17"; give one of: no, false, fp16, bf16, fp8'),
    ("x.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: missing.json}\n", "deepspeed_config.deepspeed_config_file: cannot read missing.json"),
]


@pytest.mark.parametrize("name, contents, line", REFUSED, ids=[line for _, _, line in REFUSED])
def test_files_that_are_refused(tmp_path, name, contents, line):
    path = write(tmp_path, name, contents)
    result = program.run("plan", f"--from={path}", "--model=gpt2", "--gpus=8", check=False)
    assert result.returncode == 1 and result.stderr.startswith(f"error: --from: {path}: {line}"), result.stderr[:500]
    assert result.stderr.count("\n") == 1 and len(result.stderr) < 500 and not result.stdout


@pytest.mark.parametrize("options, line", [
    (["--from={}"], "--from: cannot read {}: Is a directory"),
    (["--from={}/nothing.json"], "--from: cannot read {}/nothing.json: No such file or directory"),
    (["--from="], "--from: the name is empty"),
    (["--from"], "--from needs a value"),
])
def test_names_that_are_refused(tmp_path, options, line):
    result = program.run("plan", *(option.format(tmp_path) for option in options), check=False)
    assert result.returncode == 1 and result.stderr.startswith("error: " + line.format(tmp_path)) and result.stderr.count("\n") == 1
