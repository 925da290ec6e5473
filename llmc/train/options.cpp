#include "llmc/train/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/core/version.h"
#include "llmc/train/config_file.h"
#include "llmc/train/generate.h"
#include "llmc/train/option_rules.h"
#include "llmc/train/resume.h"
#include "llmc/train/setting_values.h"

namespace llmc {

namespace {

Choices recompute_names() {
    Choices names;
    for (const auto kind : {RecomputeKind::none, RecomputeKind::selective, RecomputeKind::block})
        names.emplace_back(name_of(kind));
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

Choices pipeline_schedule_names() {
    Choices names;
    for (const PipelineSchedule schedule : all_pipeline_schedules) names.emplace_back(name_of(schedule));
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
    for (const FamilyOption& option : family_options()) {
        const auto value = [&](auto& values) -> auto& { return values.find(option.name)->second; };
        if (option.is_switch()) {
            setting(option.name.data(), value(o.of_model.switches), option.help.data(), any);
        } else {
            setting(option.name.data(), value(o.of_model.sizes), option.help.data(), any);
        }
    }
    setting("init", o.init, "Start from the weights in FILE.safetensors (GPT-2's names)", any);

    group("Data");
    setting("train-data", o.train_data, "FILE.txt as bytes or shards 'PATTERN*.bin'; default stories", any);
    setting("val-data", o.val_data, "For validation; default a text's last tenth, none for shards", any);

    setting("bpe-dir", o.bpe_directory, "GPT-2's encoder.json, vocab.bpe; default data/gpt2_bpe if there",
            any);

    group("Training");
    setting("steps", o.steps, "Optimizer steps; 0 shows what would run and its memory", any);
    setting("global-batch-tokens", o.global_batch_tokens,
            "Tokens of a step over all processes; default 24 sequences", any);
    setting("micro-batch-size", o.micro_batch_size, "Sequences at once; default 2048 tokens, 65536 on GPUs",
            any);
    setting("dtype", o.dtype, "Of computing; default bf16 on GPUs, fp32 on the CPU", Choices{"fp32", "bf16"});
    setting("gradient-dtype", o.gradient_dtype,
            "Keep and reduce gradients in this; bf16 only with --dtype bf16", Choices{"fp32", "bf16"});
    setting("recompute", o.recompute, "For less memory: layernorms and GELU, or whole blocks",
            recompute_names());
    setting("recompute-every", o.recompute_every, "Recompute one block of so many; default 1: every one",
            any);
    setting("device", o.device, "Where to compute; auto: on GPUs where there are any",
            Choices{"auto", "cpu", "cuda"});
    setting("attention", o.attention, "On GPUs: our own kernels, or cuDNN's", Choices{"flash", "cudnn"});
    setting("tf32", o.tf32, "On GPUs: round the factors of fp32 products to TF32", any);
    setting("cuda-sync", o.cuda_sync, "Wait for every kernel, and name one that fails", any);
    setting("share-gpu", o.share_gpu, "Let processes share a GPU, as a test", any);
    setting("seed", o.seed, "Of initial weights, order of the data, samples, rounding", any);
    setting("comm-timeout", o.communication_timeout,
            "Seconds to wait for silent processes; on GPUs longer than a step", any);

    group("Sharding (ZeRO, FSDP)");
    setting("zero-stage", o.zero_stage, "In shards 1: optimizer state, 2: gradients too, 3: all", any);
    setting("zero-shard-size", o.zero_shard_size, "Processes of a group that has all shards; default all",
            any);
    setting("reduce-every", o.reduce_every, "When to reduce gradients; from stage 2 micro-batch",
            Choices{"step", "micro-batch"});
    setting("prefetch-units", o.prefetch_units, "Stage 3: gather parameters so many parts ahead; default 1",
            any);
    setting("reshard-after-forward", o.reshard_after_forward, "Stage 3: gather again for the backward pass",
            any);
    setting("overlap-grad-reduce", o.overlap_grad_reduce, "Communicate beside computing", any);
    setting("check-replicas-every", o.check_replicas_every,
            "Compare what processes have alike every so many steps; 0: never", any);

    group("Tensor parallelism");
    setting("tensor-parallel", o.tensor_parallel, "Processes that share each layer's products", any);
    setting("sequence-parallel", o.sequence_parallel, "And the tokens between these", any);

    group("Pipeline");
    setting("pipeline-parallel", o.pipeline_parallel, "Stages, each with a part of the layers", any);
    setting("pipeline-schedule", o.pipeline_schedule, "Order of the stages' work; default 1f1b",
            pipeline_schedule_names());
    setting("virtual-stages", o.virtual_stages,
            "Chunks of layers of a stage; default 2 if interleaved, else 1", any);
    setting("pipeline-layers", o.pipeline_layers, "Layers of each chunk: 7,6,6,5; default by their cost",
            any);

    group("Optimizer (AdamW)");
    setting("lr", o.learning_rate, "Learning rate after warmup; default one that suits --model", any);
    setting("warmup-steps", o.warmup_steps, "Steps over which it rises; default 100, 0 if constant", any);
    setting("lr-schedule", o.schedule, "How it falls after that (wsd: linearly, in its last fifth)",
            schedule_names());
    setting("min-lr-fraction", o.min_lr_fraction, "Where it is after the last step, as a fraction of --lr",
            any);
    setting("weight-decay", o.weight_decay, "On tensors of two dimensions, the embeddings included", any);
    setting("beta1", o.beta1, "Decay of the first moment", any);
    setting("beta2", o.beta2, "Decay of the second moment", any);
    setting("eps", o.eps, "Added to the root of the second moment", any);
    setting("grad-clip", o.grad_clip, "Largest global norm of the gradient; 0 does not clip", any);

    setting("stochastic-rounding", o.stochastic_rounding,
            "Round weights to --dtype bf16 by chance, not to nearest", any);

    group("Validation and samples");
    setting("val-every", o.val_every, "Validate every so many steps and after the last; 0: only then", any);
    setting("val-batches", o.val_batches, "Global batches of a validation; 0: all there are", any);
    setting("eval-hellaswag", o.eval_hellaswag, "Score the endings in FILE.jsonl (HellaSwag's own lines)",
            any);
    setting("eval-every", o.eval_every, "Score every so many steps and after the last; 0: only then", any);
    setting("eval-examples", o.eval_examples, "Score the first so many examples; 0: all there are", any);
    setting("sample-every", o.sample_every, "Sample every so many steps and after the last; 0: only then",
            any);
    setting("sample-tokens", o.sample_tokens, "Tokens of a sample; 0: no samples", any);
    setting("prompt", o.prompt, "What samples begin with: text (\\n is a new line), or token ids", any);
    setting("temperature", o.temperature, "Divides the logits; 0 takes the likeliest token", any);
    setting("top-k", o.top_k, "Sample from the k likeliest tokens; 0: from all", any);
    setting("top-p", o.top_p, "And of these the fewest that are as likely together; 1: from all", any);

    group("Results");
    setting("out-dir", o.out_dir, "Where results go; default runs/ and the time", any);
    setting("metrics", o.metrics, "JSON lines, one a step; default metrics.jsonl in --out-dir", any);
    setting("checkpoint-every", o.checkpoint_every,
            "Save every so many steps and after the last; 0: only then", any);
    setting("export", o.export_file, "Write the final weights to FILE.safetensors (GPT-2's names)", any);
}

constexpr auto no_group = [](const char*) {};

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
            const auto refuse = [name, &value, choices](const std::string& given) {
                check_value(name, given, value, choices);
                return std::string();
            };
            option->check(CLI::Validator(refuse, ""));
            std::string text = std::is_same_v<Value, bool> ? "[={true,false}]"
                               : is_text<Value>            ? "TEXT"
                                                           : "NUMBER";
            if (!choices.empty()) {
                text = fmt::format("{{{}}}", fmt::join(choices, ","));
            }
            if (!is_unset(value)) text += fmt::format(" [{}]", value_of(value));
            option->option_text(text);
        });
}

std::vector<std::string> names_of_options(const CLI::App& app) {
    std::vector<std::string> names;
    for (const CLI::Option* option : app.get_options()) names.push_back(option->get_lnames().front());
    return names;
}

// What the command line holds beside options and their values.
[[noreturn]] void refuse_unknown(const CLI::App& app) {
    const std::string given = app.remaining().front();
    if (!given.starts_with('-')) {
        user_error("'{}' is no option and no option's value; ./train_gpt --help lists the options", given);
    }
    const std::string name = given.substr(0, given.find('='));
    const std::string bare = name.substr(std::min(name.find_first_not_of('-'), name.size()));
    const std::string nearest = nearest_name(bare, names_of_options(app));
    user_error("there is no option {}{}; ./train_gpt --help lists them all", name,
               nearest.empty() ? "" : "; the nearest is --" + nearest);
}

// What a configuration file gives and another choice on the command line leaves without a meaning.
void pass_over_what_has_no_meaning(Options& options) {
    for (const DependentSetting& setting : dependent_settings()) {
        const auto place = options.lines.find(setting.name);
        if (place == options.lines.end() || !options.given.contains(setting.on) ||
            !setting.is_given(options) || setting.has_meaning(options))
            continue;
        options.notes.push_back(fmt::format("{}, line {}: --{} is passed over: it {}", options.config_file,
                                            place->second, setting.given, setting.purpose));
        setting.drop(options);
        options.lines.erase(place);
    }
}

// Gives the settings of a configuration file to the options that the command line does not give.
void apply_config(CLI::App& app, Options& options) {
    const std::string& file = options.config_file;
    std::vector<std::string> names;
    std::map<std::string, ConfigType> types;
    Options defaults;
    for_each_setting(defaults, no_group,
                     [&](const char* name, const auto& value, const char*, const Choices&) {
                         using Value = std::decay_t<decltype(value)>;
                         names.emplace_back(name);
                         types[name] = is_text<Value>                ? ConfigType::text
                                       : std::is_same_v<Value, bool> ? ConfigType::truth
                                                                     : ConfigType::number;
                     });
    const std::vector<FamilyOption> sizes = family_options();
    constexpr std::array what = {"a text, in quotation marks", "a number, without quotation marks",
                                 "true or false"};
    for (const ConfigSetting& setting : read_config_file(file)) {
        try {
            if (!types.contains(setting.name)) {
                const std::string nearest = nearest_name(setting.name, names);
                user_error(
                    "there is no setting {}; {}", setting.name,
                    nearest.empty() ? "./train_gpt --help lists them all" : "the nearest is " + nearest);
            }
            const ConfigType type = types.at(setting.name);
            if (setting.type != type)
                user_error("{} is {}", setting.name, what[static_cast<std::size_t>(type)]);
            CLI::Option& option = *app.get_option("--" + setting.name);
            // A model that is named on the command line comes with its sizes.
            const bool other_model =
                options.given.contains("model") &&
                std::ranges::find(sizes, setting.name, &FamilyOption::name) != sizes.end();
            if (options.given.contains(setting.name) || other_model) continue;
            option.add_result(setting.value);
            option.run_callback();
            options.lines[setting.name] = setting.line;
        } catch (const UserError& fault) {
            user_error("{}, line {}: {}", file, setting.line, fault.what());
        }
    }
    pass_over_what_has_no_meaning(options);
}

// A script's --resume "$CHECKPOINT" whose variable is not set must not start afresh.
void refuse_empty_resume(const std::vector<std::string>& arguments) {
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        const bool next_is_empty = i + 1 < arguments.size() && arguments[i + 1].empty();
        if (arguments[i] == "--resume=" || (arguments[i] == "--resume" && next_is_empty)) {
            user_error(
                "--resume: the directory's name is empty; leave it out for the newest checkpoint in "
                "--out-dir");
        }
    }
}

}  // namespace

std::optional<Options> parse_options(int argc, const char* const* argv, std::string& text) {
    Options options;
    CLI::App app("Trains a GPT from scratch: ./train_gpt, or mpirun -np 8 ./train_gpt.", "train_gpt");
    app.get_formatter()->column_width(36);
    app.set_help_flag("-h,--help", "Print this and exit")->disable_flag_override();
    app.footer(
        "\nGeneration:\n"
        "  --generate prints the prompt and --sample-tokens more, each as it comes; what is not text goes "
        "to\n"
        "  standard error. Where --seq-len tokens are full, the model goes on with the later half of "
        "them.\n\n"
        "Signals:\n"
        "  Ctrl-C, SIGUSR1 and, but for mpirun's processes, SIGTERM finish the step, save a checkpoint and\n"
        "  print the command that goes on; a second one ends the program at once. Under mpirun Ctrl-C ends\n"
        "  it at once: scripts/launch.sh passes it on as SIGUSR1.\n\n"
        "Processes:\n"
        "  mpirun starts them; or torchrun, Slurm or a shell does, with RANK, WORLD_SIZE, MASTER_ADDR and\n"
        "  MASTER_PORT in their environment: then they find each other over TCP, for which they have\n"
        "  TRAIN_GPT_CONNECT_SECONDS (300). scripts/launch.sh -np N starts N on this machine.\n\n"
        "Exit status:\n"
        "  0   done\n"
        "  1   error: one line on standard error says what, why and what would do\n"
        "  75  stopped by a signal, with what it trained saved: goes on with --resume (schedulers: "
        "requeue)\n");
    app.set_version_flag("--version",
                         fmt::format("train_gpt {} (commit {})\nGPUs: {}", version(), commit(), gpu_part()))
        ->disable_flag_override();
    add_settings(app, options);

    std::string resume;
    CLI::Option* resume_option =
        app.add_option("--resume", resume, "Go on from a checkpoint or a run; alone: in --out-dir or runs/")
            ->expected(0, 1)
            ->configurable(false)
            ->option_text("[DIR]")
            ->group("Results");
    resume_option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    // What is asked of one start of the program, and no configuration holds.
    const auto flag = [&app](const char* name, bool& value, const char* help, const char* group) {
        app.add_flag(name, value, help)->configurable(false)->disable_flag_override()->group(group);
    };
    flag("--generate", options.generate, "Only continue --prompt with the weights of --resume or --init",
         "Validation and samples");
    flag("--print-model", options.print_model, "Print the model's parts and operations and exit", "Model");
    flag("--print-step", options.print_step, "Print the actions of one step and exit", "Training");
    flag("--pipeline-timeline", options.pipeline_timeline,
         "Draw when stages do what; with --steps 0 do no more", "Pipeline");
    flag("--verbose", options.verbose, "Print each process's place, layers and memory", "Results");
    app.add_option("--config", options.config_file,
                   "Read options from FILE.toml; the command line overrides it")
        ->option_text("FILE")
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);

    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        text = app.help();
        return std::nullopt;
    } catch (const CLI::CallForVersion& version_text) {
        text = std::string(version_text.what()) + "\n";
        return std::nullopt;
    } catch (const CLI::ExtrasError&) {
        refuse_unknown(app);
    } catch (const CLI::ArgumentMismatch& fault) {
        // "--steps: 1 required INT missing", or "print-step was given a disallowed flag override"
        const std::string what = fault.what();
        if (what.ends_with("flag override"))
            user_error("--{} takes no value; leave it out", what.substr(0, what.find(' ')));
        user_error("{} needs a value; ./train_gpt --help lists the options", what.substr(0, what.find(':')));
    } catch (const CLI::ParseError& fault) {
        user_error("{}; ./train_gpt --help lists the options", fault.what());
    }
    for (const CLI::Option* option : app.get_options()) {
        if (option->count() > 0) options.given.insert(option->get_lnames().front());
    }
    if (options.given.contains("config") && options.config_file.empty()) {
        user_error("--config: the file's name is empty; leave the option out");
    }
    if (!options.config_file.empty()) apply_config(app, options);
    if (options.given.contains("resume")) {
        refuse_empty_resume({argv + 1, argv + argc});
        options.resume = resume;
    }
    try {
        settle_resume(options);
        if (options.generate) settle_generation(options);
        resolve(options);
        check_ranges(options);
    } catch (const UserError& fault) {
        throw UserError(with_place(options, fault.what()));
    }
    return options;
}

std::string with_place(const Options& options, std::string_view error) {
    if (!error.starts_with("--")) return std::string(error);
    const std::string_view name = error.substr(2, error.find_first_of(" :=", 2) - 2);
    const auto place = options.lines.find(name);
    if (place == options.lines.end()) return std::string(error);
    return fmt::format("{}, line {}: {}", options.config_file, place->second, error);
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
            if (is_unset(value) || options.derived.contains(name)) return;
            if constexpr (is_text<std::decay_t<decltype(value)>>) {
                text += fmt::format("{} = {}\n", name, as_config_text(value));
            } else {
                text += fmt::format("{} = {}\n", name, value_of(value));
            }
        });
    return text;
}

}  // namespace llmc
