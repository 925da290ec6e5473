#include "llmc/train/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/version.h"

namespace llmc {

namespace {

using Choices = std::vector<std::string>;

Choices model_names() {
    Choices names;
    for (const NamedModel& model : named_models()) names.emplace_back(model.name);
    return names;
}

Choices schedule_names() {
    Choices names;
    for (const auto kind :
         {ScheduleKind::cosine, ScheduleKind::linear, ScheduleKind::constant, ScheduleKind::wsd}) {
        names.emplace_back(name_of(kind));
    }
    return names;
}

// The one table of settings: calls
//   group(title)                          before the settings of a group
//   setting(name, value, help, choices)   for each setting; choices may be empty
// It serves the command line, the configuration file and the run's record alike.
template <class OptionsRef, class Group, class Setting>
void for_each_setting(OptionsRef& o, Group&& group, Setting&& setting) {
    const Choices any;
    group("Model");
    setting("model", o.model, "Sizes to start from; the options below override them", model_names());
    setting("layers", o.layers, "Transformer blocks, L", any);
    setting("heads", o.heads, "Attention heads, NH; divides the channels", any);
    setting("channels", o.channels, "Width of the residual stream, C", any);
    setting("seq-len", o.sequence_length, "Tokens of context, T", any);
    setting("vocab-size", o.vocabulary, "Vocabulary, V; 256 reads and writes bytes", any);
    setting("init", o.init, "Start from the weights in FILE.safetensors (GPT-2's names, as --export writes)",
            any);

    group("Data");
    setting("train-data", o.train_data,
            "FILE.txt as bytes, or token shards 'PATTERN*.bin'; default embedded stories", any);
    setting("val-data", o.val_data,
            "The same for validation; default the last tenth of a text, none for shards", any);

    group("Training");
    setting("steps", o.steps, "Optimizer steps; 0 does all but train", any);
    setting("global-batch-tokens", o.global_batch_tokens,
            "Tokens of one optimizer step over all processes; default 24 sequences", any);
    setting("micro-batch-size", o.micro_batch_size,
            "Sequences a process computes at once; default up to 2048 tokens", any);
    setting("dtype", o.dtype, "Compute in fp32 (default) or bf16; sums and master weights are fp32 in both",
            Choices{"fp32", "bf16"});
    setting("device", o.device, "Where to compute", Choices{"auto", "cpu", "cuda"});
    setting("seed", o.seed, "Of initial weights, order of the data, samples", any);
    setting("overlap-grad-reduce", o.overlap_grad_reduce,
            "Reduce gradients over processes while the backward pass goes on", any);
    setting("comm-timeout", o.communication_timeout, "Seconds to wait for a process that does not answer",
            any);

    group("Optimizer (AdamW)");
    setting("lr", o.learning_rate, "Learning rate after warmup; default the one that suits --model", any);
    setting("warmup-steps", o.warmup_steps, "Steps over which the rate rises; default 100, 0 if constant",
            any);
    setting("lr-schedule", o.schedule,
            "How it falls after them (wsd: constant, then linear in the last fifth)", schedule_names());
    setting("min-lr-fraction", o.min_lr_fraction, "Where it ends, as a fraction of --lr", any);
    setting("weight-decay", o.weight_decay, "On tensors of two dimensions, the embeddings included", any);
    setting("beta1", o.beta1, "Decay of the first moment", any);
    setting("beta2", o.beta2, "Decay of the second moment", any);
    setting("eps", o.eps, "Added to the root of the second moment", any);
    setting("grad-clip", o.grad_clip, "Largest global norm of the gradient; 0 does not clip", any);

    group("Validation and samples");
    setting("val-every", o.val_every,
            "Validate every so many steps, and after the last; 0: only after the last", any);
    setting("val-batches", o.val_batches, "Global batches of a validation; 0: the whole validation data",
            any);
    setting("sample-every", o.sample_every,
            "Sample every so many steps, and after the last; 0: only after the last", any);
    setting("sample-tokens", o.sample_tokens, "Tokens of a sample; 0: no samples", any);
    setting("prompt", o.prompt,
            "What a sample begins with: text (\\n is a new line) for bytes, else token ids", any);
    setting("temperature", o.temperature, "Divides the logits; 0 takes the likeliest token", any);
    setting("top-k", o.top_k, "Sample from the k likeliest tokens; 0: from all", any);

    group("Results");
    setting("out-dir", o.out_dir, "Where results go; default runs/ and the time", any);
    setting("metrics", o.metrics, "JSON lines, one a step; default metrics.jsonl in --out-dir", any);
    setting("checkpoint-every", o.checkpoint_every,
            "Save every so many steps, and after the last; 0: only after the last", any);
    setting("export", o.export_file,
            "Write the weights after the last step to FILE.safetensors (GPT-2's names)", any);
}

constexpr auto no_group = [](const char*) {};

// A setting that has no value of its own yet.
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

void add_settings(CLI::App& app, Options& options) {
    std::string group;
    for_each_setting(
        options, [&](const char* title) { group = title; },
        [&](const char* name, auto& value, const char* help, const Choices& choices) {
            using Value = std::decay_t<decltype(value)>;
            const std::string dashed = std::string("--") + name;
            CLI::Option* option = nullptr;
            if constexpr (std::is_same_v<Value, bool>) {
                option = app.add_flag(dashed, value, help);  // --name, or --name=false
            } else {
                option = app.add_option(dashed, value, help);
            }
            option->group(group)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
            std::string text = std::is_same_v<Value, bool>          ? "{true,false}"
                               : std::is_same_v<Value, std::string> ? "TEXT"
                                                                    : "NUMBER";
            if (!choices.empty()) {
                option->check(CLI::IsMember(choices));
                text = fmt::format("{{{}}}", fmt::join(choices, ","));
            }
            if (!is_unset(value)) text += fmt::format(" [{}]", value_of(value));
            option->option_text(text);
        });
}

// ---- what is refused ----

template <class T>
void require_range(const char* name, T value, T lowest, T highest) {
    if (!(value >= lowest && value <= highest)) {
        if (highest == std::numeric_limits<T>::max()) {
            user_error("--{} {} is out of range; give {} or more", name, value, lowest);
        }
        user_error("--{} {} is out of range; give {} to {}", name, value, lowest, highest);
    }
}

void check_ranges(const Options& o) {
    constexpr std::int64_t many = std::int64_t{1} << 40;
    constexpr double large = std::numeric_limits<double>::max();
    const double below_one = std::nextafter(1.0, 0.0);
    require_range<std::int64_t>("steps", o.steps, 0, many);
    if (o.micro_batch_size) require_range<std::int64_t>("micro-batch-size", *o.micro_batch_size, 1, many);
    require_range<std::int64_t>("comm-timeout", o.communication_timeout, 1, 1 << 20);
    require_range("lr", *o.learning_rate, 0.0, large);
    require_range<std::int64_t>("warmup-steps", *o.warmup_steps, 0, many);
    require_range("min-lr-fraction", o.min_lr_fraction, 0.0, 1.0);
    require_range("weight-decay", o.weight_decay, 0.0, large);
    if (!(o.beta1 >= 0 && o.beta1 < 1)) require_range("beta1", o.beta1, 0.0, below_one);
    if (!(o.beta2 >= 0 && o.beta2 < 1)) require_range("beta2", o.beta2, 0.0, below_one);
    require_range("eps", o.eps, std::numeric_limits<double>::denorm_min(), large);
    require_range("grad-clip", o.grad_clip, 0.0, large);
    require_range<std::int64_t>("val-every", o.val_every, 0, many);
    require_range<std::int64_t>("val-batches", o.val_batches, 0, many);
    require_range<std::int64_t>("sample-every", o.sample_every, 0, many);
    require_range<std::int64_t>("sample-tokens", o.sample_tokens, 0, 1 << 20);
    require_range("temperature", o.temperature, 0.0, large);
    require_range<std::int64_t>("top-k", o.top_k, 0, many);
    require_range<std::int64_t>("checkpoint-every", o.checkpoint_every, 0, many);
}

}  // namespace

GPTConfig Options::config() const {
    return {layers.value(), heads.value(), channels.value(), sequence_length.value(), vocabulary.value()};
}

DType Options::compute_dtype() const { return dtype == "bf16" ? DType::bf16 : DType::fp32; }

ScheduleKind Options::schedule_kind() const {
    for (const auto kind :
         {ScheduleKind::cosine, ScheduleKind::linear, ScheduleKind::constant, ScheduleKind::wsd}) {
        if (schedule == name_of(kind)) return kind;
    }
    programming_error("an unchecked schedule");
}

namespace {

// Sizes of the named model where none were given, and what follows from them.
void resolve(Options& o) {
    const auto model = std::find_if(named_models().begin(), named_models().end(),
                                    [&](const NamedModel& named) { return named.name == o.model; });
    o.layers = o.layers.value_or(model->config.layers);
    o.heads = o.heads.value_or(model->config.heads);
    o.channels = o.channels.value_or(model->config.channels);
    o.sequence_length = o.sequence_length.value_or(model->config.sequence_length);
    o.vocabulary = o.vocabulary.value_or(model->config.vocabulary);
    check_config(o.config());
    o.global_batch_tokens = o.global_batch_tokens.value_or(24 * *o.sequence_length);
    o.learning_rate = o.learning_rate.value_or(model->learning_rate);
    o.warmup_steps = o.warmup_steps.value_or(o.schedule_kind() == ScheduleKind::constant ? 0 : 100);
    if (o.device == "cuda")
        user_error("--device cuda: this program was built for the CPU only; try --device cpu");
    o.device = "cpu";
    if (o.dtype.empty()) o.dtype = "fp32";
}

}  // namespace

std::optional<Options> parse_options(int argc, const char* const* argv, std::string& text) {
    Options options;
    CLI::App app("Trains a GPT from scratch: ./train_gpt, or mpirun -np 8 ./train_gpt.", "train_gpt");
    app.get_formatter()->column_width(40);
    app.set_help_flag("-h,--help", "Print this and exit");
    app.set_version_flag("--version", fmt::format("train_gpt {} (commit {})", version(), commit()));
    add_settings(app, options);

    std::string resume;
    CLI::Option* resume_option =
        app.add_option("--resume", resume,
                       "Go on from a checkpoint's directory; alone: the newest in --out-dir")
            ->expected(0, 1)
            ->configurable(false)
            ->option_text("[DIR]")
            ->group("Results");
    resume_option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    app.add_flag("--print-step", options.print_step, "Print the actions of one step and exit")
        ->configurable(false)
        ->group("Training");
    app.set_config("--config", "", "Read options from FILE.toml; the command line overrides it")
        ->option_text("FILE");
    app.allow_config_extras(CLI::config_extras_mode::error);

    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        text = app.help();
        return std::nullopt;
    } catch (const CLI::CallForVersion& version_text) {
        text = std::string(version_text.what()) + "\n";
        return std::nullopt;
    } catch (const CLI::ParseError& fault) {
        user_error("{}; ./train_gpt --help lists the options", fault.what());
    }
    if (resume_option->count() > 0) options.resume = resume;
    resolve(options);
    check_ranges(options);
    return options;
}

nlohmann::ordered_json to_json(const Options& options) {
    nlohmann::ordered_json json;
    for_each_setting(options, no_group,
                     [&](const char* name, const auto& value, const char*, const Choices&) {
                         json[name] = nullptr;
                         if (!is_unset(value)) json[name] = value_of(value);
                     });
    return json;
}

std::string to_toml(const Options& options) {
    std::string text =
        "# The configuration of a run: ./train_gpt --config FILE repeats it; options override it.\n";
    for_each_setting(
        options, [&](const char* title) { text += fmt::format("\n# {}\n", title); },
        [&](const char* name, const auto& value, const char*, const Choices&) {
            if (is_unset(value)) return;
            if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::string>) {
                const char quote = value.find('"') == std::string::npos ? '"' : '\'';
                text += fmt::format("{} = {}{}{}\n", name, quote, value, quote);
            } else {
                text += fmt::format("{} = {}\n", name, value_of(value));
            }
        });
    return text;
}

}  // namespace llmc
