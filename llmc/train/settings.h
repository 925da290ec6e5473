// The one table of settings, with the help text of each. The command line, the configuration file and the record
// of a run use it (options.cpp).
//
// Before the table stand the functions for values of any type: whether a value is set, and whether a text is a
// valid value. A UserError about a value names the option. After the table stand the rules about options.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/model/family.h"
#include "llmc/model/part_lists.h"
#include "llmc/optim/schedule.h"
#include "llmc/parallel/pipeline/pipeline_schedule.h"
#include "llmc/train/options.h"
#include "llmc/train/sources.h"

namespace llmc {

using Choices = std::vector<std::string>;

// The text of --help for a setting: what it does, and the word that stands for its value.
struct Help {
    const char* text;
    const char* value = "N";
};

// A text in lines of the width that --help has for it.
std::string as_help(std::string_view text);

// Whether the value of a setting is the name of a file or a folder, or several of them.
inline bool is_name_of_file(std::string_view name, const Help& help) {
    const std::string_view value = help.value;
    return value == "FILE" || value.starts_with("DIR") || value == "NAME" || name == "model";
}

// Whether a setting has no value yet.
template <class T>
bool is_unset(const T& value) {
    if constexpr (std::is_same_v<T, std::string>) return value.empty();
    return false;
}
template <class T>
bool is_unset(const std::optional<T>& value) {
    return !value.has_value();
}
template <class T>
const T& value_of(const T& value) {
    return value;
}
template <class T>
const T& value_of(const std::optional<T>& value) {
    return *value;
}
template <class T>
using ValueOf = std::decay_t<decltype(value_of(std::declval<const T&>()))>;
// A configuration file has text in quotation marks, and switches are true or false there.
template <class T>
constexpr bool is_text = std::is_same_v<ValueOf<T>, std::string>;
template <class T>
constexpr bool is_switch = std::is_same_v<ValueOf<T>, bool>;

template <class T>
void check_number(std::string_view name, const std::string& text, std::string_view what) {
    constexpr std::string_view example = std::is_same_v<T, double> ? "0.001" : "100";
    T number{};
    const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(begin, end, number);
    if (error == std::errc::result_out_of_range)
        user_error("--{} {} is too large or too small; give a number such as {}", name, text, example);
    if (error != std::errc() || rest != end)
        user_error("--{}: '{}' is not {}; give a number such as {}", name, text, what, example);
}

// Throws UserError if the text is not a value of the setting's type.
template <class T>
void check_value(std::string_view name, const std::string& text, const T& /*setting*/, const Choices& choices,
                 const Help& help) {
    if constexpr (std::is_same_v<T, std::string>) {
        if (!choices.empty() && std::ranges::find(choices, text) == choices.end()) {
            user_error("--{}: unknown value '{}'; choose one of: {}", name, text, fmt::join(choices, ", "));
        }
        if (!is_utf8(text) && is_name_of_file(name, help))
            user_error("--{} {}: this name is not valid UTF-8, so no record of a run can hold it; rename it",
                       name, text);
        if (!is_utf8(text)) user_error("--{}: the text is not valid UTF-8; give it in UTF-8", name);
        if (text.empty() && name != "prompt")
            user_error("--{}: the value is empty; give a value, or leave the option out", name);
    } else if constexpr (std::is_same_v<T, bool>) {
        if (text != "true" && text != "false")
            user_error("--{}: '{}' is neither true nor false; give true or false", name, text);
    } else if constexpr (std::is_same_v<T, double>) {
        check_number<double>(name, text, "a number");
    } else if constexpr (std::is_same_v<T, std::uint64_t>) {
        check_number<T>(name, text, "a whole number of 0 or more");
    } else {
        check_number<T>(name, text, "a whole number");
    }
}
template <class T>
void check_value(std::string_view name, const std::string& text, const std::optional<T>& /*setting*/,
                 const Choices& choices, const Help& help) {
    check_value(name, text, T{}, choices, help);
}

template <class T>
void require_range(const char* name, T value, T lowest, T highest) {
    if (!(value >= lowest && value <= highest)) {
        user_error("--{} {} is out of range; give {} to {}", name, value, lowest, highest);
    }
}

inline Choices recompute_names() {
    Choices names;
    for (const auto kind : {RecomputeKind::none, RecomputeKind::selective, RecomputeKind::block})
        names.emplace_back(name_of(kind));
    return names;
}

inline Choices schedule_names() {
    Choices names;
    for (const auto kind :
         {ScheduleKind::cosine, ScheduleKind::linear, ScheduleKind::constant, ScheduleKind::wsd}) {
        names.emplace_back(name_of(kind));
    }
    return names;
}

inline Choices pipeline_schedule_names() {
    Choices names;
    for (const PipelineSchedule schedule : all_pipeline_schedules) names.emplace_back(name_of(schedule));
    return names;
}

// Calls
//   group(title)                          before the settings of a group
//   setting(name, value, help, choices)   for each setting; choices may be empty
template <class OptionsRef, class Group, class Setting>
void for_each_setting(OptionsRef& o, Group&& group, Setting&& setting) {
    const Choices any;
    group("Model");
    setting("model", o.model,
            {"Use this model, or that of a folder in Hugging Face's format, for what the options of the "
             "architecture "
             "leave out",
             "NAME"},
            model_names());
    setting("init", o.init,
            {"Start from the weights in a safetensors file with Hugging Face names, in a folder in Hugging "
             "Face's format, or in the directory of a checkpoint or a run",
             "FILE"},
            any);
    group("Architecture");
    for (const FamilyOption& option : family_options()) {
        std::visit(
            [&](auto& value) {
                setting(option.name.data(), value, {option.help.data(), option.value.data()}, option.choices);
            },
            o.model_options.find(option.name)->second);
    }

    group("Adapters (LoRA)");
    setting(
        "lora-rank", o.lora_rank,
        {"Leave the weights of --init as they are, and train adapters of rank N beside the layers' matrices"},
        any);
    setting("lora-alpha", o.lora_alpha, {"Scale the adapters by N divided by their rank"}, any);
    setting("lora-rslora", o.lora_rslora,
            {"Scale them by --lora-alpha divided by the square root of their rank"}, any);
    setting("lora-layers", o.lora_layers,
            {"Adapt these matrices of each layer, such as q,v: q, k, v, o, gate, up, down, or all", "LIST"},
            any);
    setting("base-dtype", o.base_dtype,
            {"Keep the frozen matrices of the layers in 4 bits, as QLoRA does (default: the compute dtype)"},
            Choices{"nf4"});
    setting("lora", o.lora,
            {"Take the adapter in DIR, which PEFT or --export has written; its base is --init, or the folder "
             "that it names",
             "DIR"},
            any);

    group("Data");
    setting("train-data", o.train_data,
            {"Train on a text file, read as bytes, or on token shards 'PATTERN*.bin' (default: generated "
             "stories)",
             "FILE"},
            any);
    setting(
        "val-data", o.val_data,
        {"Validate on FILE (default: the last tenth of a training text; nothing for token shards)", "FILE"},
        any);
    setting(
        "tokenizer", o.tokenizer,
        {"Read tokenizer.json, or GPT-2's encoder.json and vocab.bpe, from DIR (default: the model's folder, "
         "or data/gpt2_bpe for GPT-2's vocabulary)",
         "DIR"},
        any);

    group("Training");
    setting("steps", o.steps,
            {"Train for N steps; 0: show the plan, and evaluate and sample given weights, without training"},
            any);
    setting("global-batch-tokens", o.global_batch_tokens,
            {"Use N tokens per step over all processes (default: 24 sequences, or the next number that the "
             "processes share evenly)"},
            any);
    setting("micro-batch-size", o.micro_batch_size,
            {"Compute N sequences at once (default: 2048 tokens; on GPUs 65536)"}, any);
    setting("recompute", o.recompute,
            {"Save memory by recomputing layernorms and GELU (selective) or whole blocks (block) in the "
             "backward pass"},
            recompute_names());
    setting("recompute-every", o.recompute_every, {"Recompute one block in N (default: 1, every block)"},
            any);
    setting("seed", o.seed, {"Seed initial weights, data order, samples and rounding with N"}, any);
    setting(
        "comm-timeout", o.communication_timeout,
        {"End the job if a process does not answer for N seconds; on GPUs, N must exceed the time of a step"},
        any);

    group("Precision");
    setting("precision", o.precision, {"Set the formats of numbers together; options given beside it win"},
            Choices{"fp32", "tf32", "bf16", "fp16", "te-fp8", "bf16-stochastic"});
    setting("dtype", o.dtype, {"Compute in this format (default: bf16 on GPUs, fp32 on the CPU)"},
            Choices{"fp32", "bf16", "fp16"});
    setting("tf32", o.tf32, {"On GPUs, round the factors of fp32 products to TF32"}, any);
    setting("loss-scale", o.loss_scale,
            {"With --dtype fp16, multiply the loss by N, a power of two (default: a scale that adapts)"},
            any);
    setting("initial-loss-scale", o.initial_loss_scale,
            {"Begin with this scale (default: the larger of 65536 and the tokens of a step)"}, any);
    setting("loss-scale-window", o.loss_scale_window, {"Double the scale after N steps without overflow"},
            any);
    setting("loss-scale-hysteresis", o.loss_scale_hysteresis,
            {"Halve the scale from the N-th overflow since the last doubling on"}, any);
    setting("gradient-dtype", o.gradient_dtype,
            {"Keep and reduce gradients in this format; bf16 needs --dtype bf16"}, Choices{"fp32", "bf16"});
    setting("moments-dtype", o.moments_dtype,
            {"Keep the optimizer's moments in this format; bf16 is rounded stochastically"},
            Choices{"fp32", "bf16", "8bit"});
    setting("master-dtype", o.master_dtype,
            {"With --dtype bf16, keep a copy of the weights in fp32, or none and round them stochastically"},
            Choices{"fp32", "none"});
    setting("fp8", o.fp8,
            {"With --dtype bf16, multiply in the blocks in 8 bits, scaled by the numbers themselves or by "
             "those of the last steps"},
            Choices{"none", "current", "delayed"});
    setting("fp8-history", o.fp8_history,
            {"With --fp8 delayed, scale by the greatest numbers of the last N steps"}, any);

    group("Devices");
    setting("device", o.device, {"Compute on this device; auto uses GPUs if there are any"},
            Choices{"auto", "cpu", "cuda"});
    setting("attention", o.attention, {"On GPUs, use this program's own attention kernels or cuDNN's"},
            Choices{"flash", "cudnn"});
    setting("cuda-sync", o.cuda_sync, {"Wait for every GPU kernel, so that an error names the kernel"}, any);
    setting("share-gpu", o.share_gpu, {"Let several processes share one GPU, for tests"}, any);

    group("Sharding (ZeRO, FSDP)");
    setting("zero-stage", o.zero_stage,
            {"Shard optimizer state (1), gradients too (2), parameters too (3), or as FSDP's NO_SHARD, "
             "SHARD_GRAD_OP, "
             "FULL_SHARD, HYBRID_SHARD"},
            any);
    setting("zero-shard-size", o.zero_shard_size,
            {"Shard over groups of N data-parallel processes (default: all)"}, any);
    setting("reduce-every", o.reduce_every,
            {"Reduce gradients once per step or micro-batch (default: micro-batch from ZeRO stage 2, unless "
             "layer by layer, else step)"},
            Choices{"step", "micro-batch"});
    setting("prefetch-units", o.prefetch_units,
            {"Gather parameters, with ZeRO stage 3, or bring them, with --offload-parameters, N units ahead "
             "(default: 1; offloaded, 2 or 3)"},
            any);
    setting("reshard-after-forward", o.reshard_after_forward,
            {"With ZeRO stage 3, free parameters after the forward pass and gather them again for the "
             "backward pass"},
            any);
    setting("overlap-grad-reduce", o.overlap_grad_reduce, {"Overlap communication with computation"}, any);
    setting("check-replicas-every", o.check_replicas_every,
            {"Compare the processes' copies of the state every N steps; 0: never"}, any);

    group("Offload");
    setting(
        "offload-optimizer", o.offload_optimizer,
        {"Keep the optimizer's moments and the master weights in host memory, or on a disk; on GPUs the host "
         "updates, and "
         "has the gradients"},
        Choices{"none", "cpu", "nvme"});
    setting("offload-parameters", o.offload_parameters,
            {"Keep the layers' parameters in host memory, or on a disk, between their uses"},
            Choices{"none", "cpu", "nvme"});
    setting("nvme-dir", o.nvme_dir,
            {"With --offload-* nvme, the directory on a disk; with several, processes take turns",
             "DIR[,DIR...]"},
            any);

    group("Tensor parallelism");
    setting("tensor-parallel", o.tensor_parallel, {"Split each layer over N processes"}, any);
    setting("sequence-parallel", o.sequence_parallel,
            {"Split the tokens of a micro-batch over tensor-parallel processes between layers"}, any);

    group("Pipeline");
    setting("pipeline-parallel", o.pipeline_parallel, {"Split the layers into N pipeline stages"}, any);
    setting("pipeline-schedule", o.pipeline_schedule,
            {"Order the stages' work by this schedule (default: 1f1b; interleaved if --virtual-stages is "
             "above 1)"},
            pipeline_schedule_names());
    setting("virtual-stages", o.virtual_stages,
            {"Split each stage into N chunks of layers (default: 2 if interleaved, each layer if "
             "breadth-first, else 1)"},
            any);
    setting(
        "pipeline-layers", o.pipeline_layers,
        {"Give the chunks these numbers of layers, such as 7,6,6,5 (default: balance their cost)", "LIST"},
        any);

    group("Optimizer");
    setting("optimizer", o.optimizer, {"Update the weights by this formula"}, optimizer_names());
    setting("lr", o.learning_rate,
            {"Use learning rate N after warmup (default: depends on --model and --optimizer)"}, any);
    setting(
        "warmup-steps", o.warmup_steps,
        {"Raise the learning rate over N steps (default: a tenth of --steps, at most 100; 0 if constant)"},
        any);
    setting("lr-schedule", o.schedule,
            {"Decay the learning rate this way after warmup; wsd decays linearly in the last fifth"},
            schedule_names());
    setting("min-lr-fraction", o.min_lr_fraction, {"Decay the learning rate to N times --lr"}, any);
    static const std::string decay_help = fmt::format(
        "Apply weight decay N to matrices and embeddings, not to biases and layernorms (default: {})",
        default_weight_decays());
    setting("weight-decay", o.weight_decay, {decay_help.c_str()}, any);
    setting("grad-clip", o.grad_clip, {"Clip the gradient's global norm to N; 0: do not clip"}, any);
    setting("stochastic-rounding", o.stochastic_rounding,
            {"Round weights to --dtype bf16 stochastically, not to nearest"}, any);

    group("Hyperparameters of optimizers");
    for (const HyperparameterOption& option : hyperparameter_options()) {
        std::visit(
            [&](auto& value) { setting(option.name.data(), value, {option.help.c_str()}, option.choices); },
            o.optimizer_options.find(option.name)->second);
    }

    group("Validation and samples");
    setting("val-every", o.val_every, {"Validate every N steps and after the last; 0: after the last only"},
            any);
    setting("val-batches", o.val_batches, {"Validate on at most N global batches; 0: on all"}, any);
    setting("eval-hellaswag", o.eval_hellaswag,
            {"Score the HellaSwag examples in FILE (such as hellaswag_val.jsonl)", "FILE"}, any);
    setting("eval-every", o.eval_every, {"Score every N steps and after the last; 0: after the last only"},
            any);
    setting("eval-examples", o.eval_examples, {"Score the first N examples; 0: all"}, any);
    setting("sample-every", o.sample_every,
            {"Sample every N steps and after the last; 0: after the last only"}, any);
    setting("sample-tokens", o.sample_tokens, {"Sample N tokens each time; 0: no samples"}, any);
    setting("prompt", o.prompt, {"Begin samples with TEXT (\\n is a new line) or with token ids", "TEXT"},
            any);
    setting("temperature", o.temperature, {"Divide the logits by N; 0: take the likeliest token"}, any);
    setting("top-k", o.top_k, {"Sample from the N likeliest tokens; 0: from all"}, any);
    setting("top-p", o.top_p,
            {"Sample from the smallest set of tokens whose probabilities sum to N; 1: from all"}, any);

    group("Results");
    setting("out-dir", o.out_dir, {"Write results to DIR (default: runs/ and the current time)", "DIR"}, any);
    setting("metrics", o.metrics,
            {"Write one JSON line per step to FILE (default: metrics.jsonl in --out-dir)", "FILE"}, any);
    setting("export", o.export_file,
            {"Write the final weights to NAME.safetensors, or to a new folder NAME in Hugging Face's format",
             "NAME"},
            any);
    setting("merge", o.merge,
            {"With --export, write the base with its adapters merged into it: into the weights beside which "
             "they were trained (also --merge alone), or into the original ones of its files"},
            Choices{"trained", "original"});
    setting("export-dtype", o.export_dtype,
            {"Round exported weights to this dtype (default: that of the folder of --init or --model; else "
             "fp32)"},
            {"fp32", "bf16", "fp16"});
    setting("log-every", o.log_every,
            {"Print a line for every N-th step; a terminal's last line shows each; metrics have all"}, any);

    group("Checkpoints");
    setting("checkpoint-every", o.checkpoint_every,
            {"Save every N steps and after the last; 0: after the last only"}, any);
    setting("checkpoint-async", o.checkpoint_async,
            {"Save while training goes on, from a copy in memory, if there is room for it"}, any);
    setting("keep-last", o.keep_last,
            {"Remove the run's older checkpoints when a new one is complete, but the last N; 0: keep all"},
            any);
    setting("keep-best", o.keep_best,
            {"Also keep the checkpoint with the lowest validation loss, in the folder best of --out-dir"},
            any);
}

// For callers that need no groups.
inline constexpr auto no_group = [](const char*) {};

// ---- Rules: defaults that depend on other options, ranges, and exclusions (option_rules.cpp)

// A setting that has an effect only with certain values of another setting.
struct DependentSetting {
    std::string_view name, on;  // this setting, and the one that it depends on
    // The setting as messages show it: its name, with the value if only one value has an effect.
    std::string_view given;
    std::string_view purpose;  // "needs --zero-stage 3, which gathers parameters"
    std::function<bool(const Options&)> has_effect;
    std::function<bool(const Options&)> differs_from_default;
    std::function<void(Options&)> drop;
};
std::vector<DependentSetting> dependent_settings();

// Completes the options that were given with what their names lead to: the model and the settings of a checkpoint, the
// architecture of a folder, and the defaults that depend on neither device nor mesh, for which configured() (options.h)
// goes on. It reads no files. UserError for a value out of range, or one that conflicts with another.
void complete(Options& options, const Sources& sources);

}  // namespace llmc
