#include "llmc/train/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "llmc/comm/launcher.h"
#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/core/version.h"
#include "llmc/train/config_file.h"
#include "llmc/train/generate.h"
#include "llmc/train/settings.h"
#include "llmc/train/terminal.h"

namespace llmc {

namespace {

// The description column of --help, and its width.
constexpr int help_column = 36;
constexpr std::size_t help_width = 100 - help_column;

}  // namespace

std::string as_help(std::string_view text) {
    return fmt::format("{}", fmt::join(wrapped(text, help_width), "\n"));
}

namespace {

// Those since 0.1.
constexpr std::array<RemovedOption, 1> all_removed_options = {{{"bpe-dir", "0.2", "--tokenizer"}}};

// The help of a setting with its default. A switch that is off by default needs no such note.
template <class T>
std::string help_of(const Help& help, const T& value) {
    bool names_default = !is_unset(value);
    if constexpr (std::is_same_v<T, bool>) names_default = value;
    // A tilde stands for a space at which the line must not be broken.
    std::string text =
        as_help(names_default ? fmt::format("{} (default:~{})", help.text, value_of(value)) : help.text);
    std::ranges::replace(text, '~', ' ');
    return text;
}

// Replaces PyTorch FSDP's name of a sharding strategy by the stage of ZeRO that shards as it does.
std::function<std::string(std::string&)> stage_of_fsdp(Options& options) {
    return [&options](std::string& given) {
        options.shards_on_machine = given == "HYBRID_SHARD";
        for (const auto& [name, stage] :
             {std::pair{"NO_SHARD", "0"}, {"SHARD_GRAD_OP", "2"}, {"FULL_SHARD", "3"}, {"HYBRID_SHARD", "3"}})
            if (given == name) given = stage;
        return std::string();
    };
}

void add_settings(CLI::App& app, Options& options) {
    std::string group;
    for_each_setting(
        options, [&](const char* title) { group = title; },
        [&](const char* name, auto& value, const Help& help, const Choices& choices) {
            using Value = std::decay_t<decltype(value)>;
            const std::string dashed = std::string("--") + name;
            // Many choices belong to the text.
            const bool has_many = choices.size() > 8;
            std::string described = help.text;
            if (has_many) described += fmt::format(": {}", fmt::join(choices, ", "));
            const std::string text = help_of(Help{described.c_str(), help.value}, value);
            CLI::Option* option = nullptr;
            if constexpr (is_switch<Value>) {
                // --name, or --name=false. (For CLI11, a std::optional is a number that counts its flags.)
                option = app.add_flag_function(
                    dashed, [&value](std::int64_t count) { value = count > 0; }, text);
            } else {
                option = app.add_option(dashed, value, text);
            }
            option->group(group)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
            const auto refuse = [name, &value, choices, help](const std::string& given) {
                const bool is_folder =
                    name == std::string_view("model") && std::filesystem::is_directory(given);
                check_value(name, given, value, is_folder ? Choices() : choices, help);
                return std::string();
            };
            if (name == std::string_view("zero-stage"))
                option->transform(CLI::Validator(stage_of_fsdp(options), ""));
            if (name == std::string_view("merge")) option->expected(0, 1);
            option->check(CLI::Validator(refuse, ""));
            option->option_text(is_switch<Value> ? "[={true,false}]"
                                : choices.empty() || has_many
                                    ? help.value
                                    : fmt::format("{{{}}}", fmt::join(choices, ",")));
        });
}

std::vector<std::string> names_of_options(const CLI::App& app) {
    std::vector<std::string> names;
    for (const CLI::Option* option : app.get_options()) names.push_back(option->get_lnames().front());
    return names;
}

void refuse_removed(std::string_view name, std::span<const RemovedOption> removed) {
    const auto found = std::ranges::find(removed, name, &RemovedOption::name);
    if (found != removed.end())
        user_error("--{} was removed in {}: use {}", name, found->version, found->successor);
}

// Refuses the first argument that is neither an option nor an option's value.
[[noreturn]] void refuse_unknown(const CLI::App& app, std::span<const RemovedOption> removed) {
    const std::string given = app.remaining().front();
    if (!given.starts_with('-')) {
        user_error("unexpected argument '{}'; ./train_gpt --help lists the options", given);
    }
    const std::string name = given.substr(0, given.find('='));
    const std::string bare = name.substr(std::min(name.find_first_not_of('-'), name.size()));
    refuse_removed(bare, removed);
    const std::string nearest = nearest_name(bare, names_of_options(app));
    user_error("unknown option {}{}; ./train_gpt --help lists the options", name,
               nearest.empty() ? "" : "; did you mean --" + nearest + "?");
}

// Ignores, with a note, each setting of the configuration file that an option on the command line leaves
// without effect.
void ignore_settings_without_effect(Options& options) {
    for (const DependentSetting& setting : dependent_settings()) {
        const auto place = options.lines.find(setting.name);
        if (place == options.lines.end() || !options.given.contains(setting.on) ||
            !setting.differs_from_default(options) || setting.has_effect(options))
            continue;
        options.notes.push_back(fmt::format("{}, line {}: --{} is ignored: it {}", options.config_file,
                                            place->second, setting.given, setting.purpose));
        setting.drop(options);
        options.lines.erase(place);
    }
}

// Whether a configuration file has a hyperparameter for another optimizer: the one that it names, or else the default
// one if that has it.
bool is_for_another_optimizer(std::span<const ConfigSetting> settings, std::string_view hyperparameter,
                              const std::string& optimizer) {
    const auto named = std::ranges::find(settings, "optimizer", &ConfigSetting::name);
    if (named != settings.end()) return named->value != optimizer;
    const std::string by_default = Options().optimizer;
    const std::vector<std::string_view> with = optimizers_with(hyperparameter);
    return optimizer != by_default && std::ranges::find(with, by_default) != with.end();
}

// Applies the settings of a configuration file, except those that the command line gives too.
void apply_config(CLI::App& app, Options& options, std::span<const RemovedOption> removed) {
    const std::string& file = options.config_file;
    std::vector<std::string> names;
    std::map<std::string, ConfigType> types;
    Options defaults;
    for_each_setting(defaults, no_group,
                     [&](const char* name, const auto& value, const Help&, const Choices&) {
                         using Value = std::decay_t<decltype(value)>;
                         names.emplace_back(name);
                         types[name] = is_text<Value>     ? ConfigType::text
                                       : is_switch<Value> ? ConfigType::boolean
                                                          : ConfigType::number;
                     });
    const std::vector<FamilyOption> settings_of_families = family_options();
    constexpr std::array what = {"text in quotation marks", "a number without quotation marks",
                                 "true or false"};
    const std::vector<ConfigSetting> settings = read_config_file(file);
    for (const ConfigSetting& setting : settings) {
        try {
            if (!types.contains(setting.name)) {
                refuse_removed(setting.name, removed);
                if (app.get_option_no_throw("--" + setting.name) != nullptr)
                    user_error("{} is an option of the command line only; give --{} there", setting.name,
                               setting.name);
                const std::string nearest = nearest_name(setting.name, names);
                user_error("unknown setting {}; {}", setting.name,
                           nearest.empty() ? "./train_gpt --help lists the options"
                                           : "did you mean " + nearest + "?");
            }
            const ConfigType type = types.at(setting.name);
            if (setting.type != type)
                user_error("{} must be {}", setting.name, what[static_cast<std::size_t>(type)]);
            CLI::Option& option = *app.get_option("--" + setting.name);
            // If the command line names a model, the file's sizes are ignored; so are the numbers of another optimizer.
            const bool other_model = options.given.contains("model") &&
                                     std::ranges::find(settings_of_families, setting.name,
                                                       &FamilyOption::name) != settings_of_families.end(),
                       other_optimizer = options.given.contains("optimizer") &&
                                         options.optimizer_options.contains(setting.name) &&
                                         is_for_another_optimizer(settings, setting.name, options.optimizer);
            if (options.given.contains(setting.name) || other_model || other_optimizer) continue;
            option.add_result(setting.value);
            option.run_callback();
            options.lines[setting.name] = setting.line;
        } catch (const UserError& fault) {
            user_error("{}, line {}: {}", file, setting.line, fault.what());
        }
    }
    ignore_settings_without_effect(options);
}

// The arguments in reverse, as CLI11 takes them. An option with an empty value, "--name=", becomes two arguments:
// CLI11 would take the next argument for its value.
std::vector<std::string> reversed_arguments(const CLI::App& app, int argc, const char* const* argv) {
    std::vector<std::string> arguments;
    for (const std::string argument : std::span(argv, static_cast<std::size_t>(argc)).subspan(1)) {
        const CLI::Option* option = argument.ends_with('=')
                                        ? app.get_option_no_throw(argument.substr(0, argument.size() - 1))
                                        : nullptr;
        if (option != nullptr && option->get_items_expected_min() > 0) {
            arguments.insert(arguments.end(), {argument.substr(0, argument.size() - 1), ""});
        } else {
            arguments.push_back(argument);
        }
    }
    std::ranges::reverse(arguments);
    return arguments;
}

// A script may call --resume "$CHECKPOINT" with an empty variable. That must not resume from another
// checkpoint.
void refuse_empty_resume(const std::vector<std::string>& arguments) {
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        const bool next_is_empty = i + 1 < arguments.size() && arguments[i + 1].empty();
        if (arguments[i] == "--resume=" || (arguments[i] == "--resume" && next_is_empty)) {
            user_error(
                "--resume: the directory's name is empty; give --resume alone for the newest checkpoint in "
                "--out-dir");
        }
    }
}

}  // namespace

std::span<const RemovedOption> removed_options() { return all_removed_options; }

namespace {

// `command` is null for a run.
std::optional<Options> parse(int argc, const char* const* argv, std::string& text,
                             std::span<const RemovedOption> removed, const OtherCommand* command,
                             const std::map<std::string, std::string>& damages) {
    Options options;
    options.damages = damages;
    CLI::App app(command ? std::string(command->description)
                         : "Train a GPT: ./train_gpt with one process, ./train_gpt --processes 8 with eight.",
                 command ? fmt::format("train_gpt {}", command->name) : "train_gpt");
    app.get_formatter()->column_width(help_column);
    app.set_help_flag("-h,--help", "Print this help and exit")->disable_flag_override();
    if (command) app.footer(fmt::format("\nExit status:\n{}", command->exit_statuses));
    if (!command)
        app.footer(
            "\nGeneration:\n"
            "  --generate prints the prompt and then --sample-tokens more tokens, each as soon as it is "
            "sampled.\n"
            "  Standard output has the text only; everything else goes to standard error. After --seq-len\n"
            "  tokens, the model continues from the later half of them. Both end at the model's end tokens.\n"
            "  --chat writes each line of input as the model's chat template does, and prints the answer.\n\n"
            "Signals:\n"
            "  After Ctrl-C (SIGINT), SIGHUP (a closed terminal), SIGUSR1 or SIGTERM the program finishes "
            "its\n"
            "  step, saves a checkpoint and prints the command that continues the run. A second signal "
            "ends it\n"
            "  at once. Under mpirun, all but SIGUSR1 end it at once; SIGUSR1 to mpirun stops it in "
            "order.\n\n"
            "Processes:\n"
            "  --processes N starts N processes on this machine; mpirun starts them on several machines. "
            "Other\n"
            "  launchers (torchrun, Slurm, a shell) set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; "
            "the\n"
            "  processes then connect over TCP, within TRAIN_GPT_CONNECT_SECONDS (default: 300).\n\n"
            "Exit status:\n"
            "  0   success\n"
            "  1   error; one line on standard error says what, why, and what to do\n"
            "  75  stopped by a signal; all that was trained is saved, and --resume-if-any goes on\n");
    app.set_version_flag("--version",
                         fmt::format("train_gpt {} (commit {})\nGPUs: {}", version(), commit(), gpu_part()),
                         "Print the version and which GPUs it was compiled for, and exit")
        ->disable_flag_override();
    if (command) command->add_options(app);
    add_settings(app, options);

    std::string resume;
    CLI::Option* resume_option =
        app.add_option(
               "--resume", resume,
               as_help("Continue from a checkpoint or a run in DIR (default: the run in --out-dir, the "
                       "run of --config, or the newest in runs/)"))
            ->expected(0, 1)
            ->configurable(false)
            ->option_text("[DIR]")
            ->group("Checkpoints");
    resume_option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    // These modes hold for one start of the program only. A configuration file cannot set them.
    const auto flag = [&app](const char* name, bool& value, const char* help, const char* group) {
        app.add_flag(name, value, as_help(help))->configurable(false)->disable_flag_override()->group(group);
    };
    flag("--resume-if-any", options.resume_if_any,
         "Like --resume, but begin a run if there is none; for schedulers, which start a job again",
         "Checkpoints");
    flag("--new-data", options.new_data,
         "Resume although the data have changed; training goes on with the next sample in their new order",
         "Data");
    flag("--overwrite", options.overwrite, "Replace the run in --out-dir by this one", "Results");
    if (!command) {
        app.add_option("--verify-checkpoint", options.verify_checkpoint,
                       as_help("Read a checkpoint, or the newest one of a run, in DIR, compare it with its "
                               "checksums, and exit"))
            ->option_text("DIR")
            ->configurable(false)
            ->group("Checkpoints");
    }
    flag("--quiet", options.quiet, "Print only notes and the results", "Results");
    flag("--generate", options.generate, "Only continue --prompt, with the weights of --resume or --init",
         "Validation and samples");
    flag("--chat", options.chat,
         "Only talk with the model of --resume or --init: each line of input is a message",
         "Validation and samples");
    app.add_option("--system", options.system,
                   as_help("Begin the conversation of --chat with TEXT (default: the template's)"))
        ->option_text("TEXT")
        ->configurable(false)
        ->group("Validation and samples");
    flag("--print-model", options.print_model, "Print the model's parts and operations, and exit", "Model");
    flag("--print-step", options.print_step, "Print the actions of one step, and exit", "Training");
    flag("--pipeline-timeline", options.pipeline_timeline,
         "Draw a timeline of the pipeline stages; with --steps 0, draw the estimate and exit", "Pipeline");
    flag("--verbose", options.verbose,
         "Print each process's mesh coordinates, layers and memory; with --print-step, print every action",
         "Results");
    // launch_processes() in main() takes this option out of the arguments.
    std::string processes;
    if (!command) {
        app.add_option(
               fmt::format("--{}", processes_option), processes,
               as_help("Start N processes on this machine, which train together; `./train_gpt plan` plans "
                       "for any number"))
            ->option_text("N")
            ->configurable(false)
            ->group("Training");
    }
    app.add_option("--config", options.config_file,
                   "Read options from a TOML file; the command line overrides it")
        ->option_text("FILE")
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);

    try {
        app.parse(reversed_arguments(app, argc, argv));
    } catch (const CLI::CallForHelp&) {
        text = app.help();
        return std::nullopt;
    } catch (const CLI::CallForVersion& version_text) {
        text = std::string(version_text.what()) + "\n";
        return std::nullopt;
    } catch (const CLI::ExtrasError&) {
        refuse_unknown(app, removed);
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
    if (options.given.contains("merge") && options.merge.empty()) options.merge = "trained";
    if (options.given.contains("config") && options.config_file.empty()) {
        user_error("--config: the file's name is empty; give a name, or leave the option out");
    }
    if (!options.config_file.empty()) apply_config(app, options, removed);
    if (options.given.contains("resume")) {
        refuse_empty_resume({argv + 1, argv + argc});
        options.resume = resume;
    }
    if (options.resume_if_any) {
        if (options.resume) user_error("--resume-if-any and --resume are both given; leave one of them out");
        options.resume = "";
    }
    if (options.new_data && !options.resume)
        user_error("--new-data is for --resume and --resume-if-any; leave it out: a new run takes any data");
    if (options.new_data && options.steps == 0)
        user_error("--new-data is for training, and --steps 0 trains none; leave one of them out");
    if (options.overwrite && options.resume) {
        user_error("--overwrite replaces a run, and --resume{} continues it; leave one of them out",
                   options.resume_if_any ? "-if-any" : "");
    }
    if (options.quiet && options.verbose)
        user_error("--quiet and --verbose are both given; leave one of them out");
    if (options.chat && options.generate)
        user_error("--chat and --generate are both given; leave one of them out");
    if (options.given.contains("system") && !options.chat)
        user_error("--system begins the conversation of --chat; give --chat, too, or leave it out");
    try {
        options.generate = options.generate || options.chat;
        if (options.generate) check_generation(options);
        complete(options, find_sources(options));
    } catch (const UserError& fault) {
        throw UserError(with_place(options, fault.what()));
    }
    return options;
}

}  // namespace

std::optional<Options> parse_options(int argc, const char* const* argv, std::string& text,
                                     std::span<const RemovedOption> removed,
                                     const std::map<std::string, std::string>& damages) {
    return parse(argc, argv, text, removed, nullptr, damages);
}

std::optional<Options> parse_options(int argc, const char* const* argv, std::string& text,
                                     const OtherCommand& command) {
    return parse(argc, argv, text, removed_options(), &command, {});
}

std::string with_place(const Options& options, std::string_view error) {
    // An error that has its place keeps it: options that are planned in a job pass here twice.
    constexpr std::string_view of_checkpoint = "is that of the checkpoint)";
    if (!error.starts_with("--") || error.ends_with(of_checkpoint)) return std::string(error);
    const std::string_view name = error.substr(2, error.find_first_of(" :=", 2) - 2);
    const auto place = options.lines.find(name);
    const bool is_kept = options.inherited.contains(name) && !options.given.contains(name);
    if (place == options.lines.end())
        return is_kept ? fmt::format("{} (--{} {}", error, name, of_checkpoint) : std::string(error);
    return fmt::format("{}, line {}: {}", options.config_file, place->second, error);
}

nlohmann::ordered_json to_json(const Options& options) {
    nlohmann::ordered_json json;
    for_each_setting(options, no_group,
                     [&](const char* name, const auto& value, const Help&, const Choices&) {
                         json[name] = nullptr;
                         if (!is_unset(value)) json[name] = value_of(value);
                     });
    if (options.folder) json["folder"] = {{"path", options.folder->path}, {"config", options.folder->config}};
    return json;
}

std::string to_toml(const Options& options) {
    std::string text =
        "# The configuration of a run. ./train_gpt --config FILE repeats the run; options override the "
        "file.\n"
        "# Lines that begin with # are the values of settings that nobody gave. Some depend on the "
        "machine.\n";
    for_each_setting(
        options, [&](const char* title) { text += fmt::format("\n# -- {}\n", title); },
        [&](const char* name, const auto& value, const Help&, const Choices&) {
            if (is_unset(value)) return;
            const std::string_view mark = options.was_chosen(name) ? "" : "# ";
            if (name == std::string_view("model") && !options.model_folder.empty()) {
                text += fmt::format("model = {}\n", as_config_text(options.model_folder));
            } else if constexpr (is_text<std::decay_t<decltype(value)>>) {
                text += fmt::format("{}{} = {}\n", mark, name, as_config_text(value_of(value)));
            } else {
                text += fmt::format("{}{} = {}\n", mark, name, value_of(value));
            }
        });
    return text;
}

}  // namespace llmc
