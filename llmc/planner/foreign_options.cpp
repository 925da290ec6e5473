#include "llmc/planner/foreign_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <ranges>
#include <set>
#include <span>

#include "llmc/core/error.h"
#include "llmc/core/tensor.h"
#include "llmc/core/text.h"
#include "llmc/planner/foreign_config.h"
#include "llmc/planner/planned_run.h"
#include "llmc/train/settings.h"

namespace llmc {

namespace {

using Names = std::set<std::string, std::less<>>;

// The file of --from, which is taken out of the arguments; the last one, if there are several.
std::optional<std::string> take_file(std::vector<std::string>& arguments) {
    constexpr std::string_view option = "--from", joined = "--from=";
    std::optional<std::string> file;
    for (auto word = arguments.begin(); word != arguments.end();) {
        const bool is_joined = word->starts_with(joined);
        if (!is_joined && (*word != option || word + 1 == arguments.end())) {
            ++word;
            continue;
        }
        file = is_joined ? word->substr(joined.size()) : *(word + 1);
        word = arguments.erase(word, word + (is_joined ? 1 : 2));
    }
    if (file && file->empty()) user_error("--from: the name is empty; give one, or leave the option out");
    return file;
}

Names names_of_options(std::span<const std::string> arguments) {
    Names names;
    for (const std::string& word : arguments)
        if (word.starts_with("--")) names.insert(word.substr(2, word.find('=') - 2));
    return names;
}

// The value of an option; empty if it is not given.
std::string_view value_of_option(std::span<const std::string> arguments, std::string_view option) {
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        std::string_view word = arguments[i];
        if (!word.starts_with("--") || !word.substr(2).starts_with(option)) continue;
        word.remove_prefix(2 + option.size());
        if (word.starts_with('=')) return word.substr(1);
        if (word.empty() && i + 1 < arguments.size()) return arguments[i + 1];
    }
    return {};
}

// An option that has no place beside another, which stands on the command line or is the file's own.
struct Excluded {
    std::string_view by, option;
};
constexpr std::array excluded = {Excluded{"gpus", "processes"},
                                 Excluded{"processes", "gpus"},
                                 Excluded{"gpus", "nodes"},
                                 Excluded{"processes", "nodes"},
                                 Excluded{"precision", "dtype"},
                                 Excluded{"precision", "fp8"},
                                 Excluded{"precision", "master-dtype"},
                                 Excluded{"precision", "gradient-dtype"},
                                 Excluded{"precision", "moments-dtype"},
                                 Excluded{"initial-loss-scale", "loss-scale"},
                                 Excluded{"loss-scale-window", "loss-scale"},
                                 Excluded{"loss-scale-hysteresis", "loss-scale"},
                                 Excluded{"loss-scale", "initial-loss-scale"},
                                 Excluded{"loss-scale", "loss-scale-window"},
                                 Excluded{"loss-scale", "loss-scale-hysteresis"}};

// What needs --dtype bf16.
constexpr std::array of_bf16 = {"fp8", "master-dtype", "gradient-dtype"};

void drop_overridden(std::vector<ForeignSetting>& settings, const std::vector<std::string>& arguments,
                     const Names& typed) {
    if (typed.contains("dtype") && value_of_option(arguments, "dtype") != "bf16")
        std::erase_if(settings, [](const ForeignSetting& setting) {
            return std::ranges::find(of_bf16, setting.option) != of_bf16.end();
        });
    const auto is_typed = [&](std::string_view option) { return typed.contains(option); };
    std::erase_if(settings, [&](const ForeignSetting& setting) {
        return is_typed(setting.option) || std::ranges::any_of(excluded, [&](const Excluded& pair) {
                   return pair.option == setting.option && is_typed(pair.by);
               });
    });
    // A fixed scale of the file's own needs no others.
    if (std::ranges::find(settings, "loss-scale", &ForeignSetting::option) != settings.end())
        std::erase_if(settings, [](const ForeignSetting& setting) {
            return setting.option != "loss-scale" && setting.option.find("loss-scale") != std::string::npos;
        });
}

std::string as_argument(const ForeignSetting& setting) {
    return fmt::format("--{}={}", setting.option, setting.value);
}

std::vector<std::string> with_settings(const std::vector<std::string>& arguments, auto&& settings) {
    std::vector<std::string> all = {arguments.front()};
    for (const ForeignSetting& setting : settings) all.push_back(as_argument(setting));
    all.insert(all.end(), arguments.begin() + 1, arguments.end());
    return all;
}

// Drops the settings that have an effect only with a value of another one, if it has not that value. `run` is read
// without them.
void drop_without_effect(ForeignConfig& config, const Options& options) {
    for (const DependentSetting& dependent : dependent_settings())
        std::erase_if(config.settings, [&](const ForeignSetting& setting) {
            if (setting.option != dependent.name || dependent.has_effect(options)) return false;
            config.ignored[fmt::format("--{} {}", setting.option, dependent.purpose)].push_back(setting.key);
            return true;
        });
}

// Whether the run cannot be read without this setting, or not with it.
bool is_deferred(const ForeignSetting& setting, const std::vector<ForeignSetting>& all,
                 const std::vector<std::string>& arguments) {
    if (setting.option == "nvme-dir")
        return std::ranges::none_of(all,
                                    [](const ForeignSetting& other) {
                                        return other.option.starts_with("offload-") && other.value == "nvme";
                                    }) &&
               value_of_option(arguments, "offload-optimizer") != "nvme" &&
               value_of_option(arguments, "offload-parameters") != "nvme";
    return std::ranges::any_of(dependent_settings(), [&](const DependentSetting& dependent) {
        return dependent.name == setting.option;
    });
}

// Their batch is in sequences, and of ours the tokens: sequences of a micro-batch x accumulation x data-parallel ranks.
void settle_batch(ForeignConfig& config, const PlannedRun& run, const Names& typed) {
    const bool has_batch = config.batch || config.accumulation;
    if (run.described || run.asked.parameters) {
        if (has_batch) config.notes.emplace_back("the batch is ignored: such a model has no run");
        return;
    }
    if (!has_batch && !config.setting("micro-batch-size")) return;
    const Options& options = run.options;
    const std::int64_t data =
        std::max<std::int64_t>(1, run.processes / (options.pipeline_parallel * options.tensor_parallel));
    std::optional<std::int64_t> micro_batch = options.micro_batch_size;
    if (config.batch && config.accumulation && !micro_batch &&
        *config.batch % (*config.accumulation * data) == 0) {
        micro_batch = *config.batch / (*config.accumulation * data);
        config.settings.push_back({"micro-batch-size", fmt::to_string(*micro_batch), "train_batch_size"});
    }
    const auto& automatic = config.automatic;
    const bool is_open = !config.batch && !config.accumulation &&
                         std::ranges::find(automatic, "gradient_accumulation_steps") != automatic.end();
    if (typed.contains("global-batch-tokens") || is_open) {
        if (config.accumulation)
            config.notes.emplace_back(
                "the accumulation of micro-batches is ignored: it follows from --global-batch-tokens");
        return;
    }
    if (!config.batch && !micro_batch) {
        config.notes.push_back(fmt::format(
            "an accumulation of {} needs the size of a micro-batch, which the file does not have: add "
            "--micro-batch-size, or --global-batch-tokens",
            plural(*config.accumulation, "micro-batch", "es")));
        return;
    }
    const std::int64_t product =
        saturated_product(saturated_product(micro_batch.value_or(1), config.accumulation.value_or(1)), data);
    if (config.batch && config.accumulation && product != *config.batch)
        config.notes.push_back(
            fmt::format("train_batch_size {} is not {} a micro-batch x {} micro-batches x {}: the "
                        "micro-batches follow from it",
                        *config.batch, plural(micro_batch.value_or(1), "sequence"), *config.accumulation,
                        plural(data, "data-parallel rank")));
    const std::int64_t sequences = config.batch.value_or(product);
    config.settings.push_back({"global-batch-tokens",
                               fmt::to_string(saturated_product(sequences, options.sequence_length())),
                               config.batch ? "train_batch_size" : "train_micro_batch_size_per_gpu"});
}

std::string listed(std::vector<std::string> keys) {
    constexpr std::size_t most = 30;
    const std::size_t more = keys.size() > most ? keys.size() - most : 0;
    keys.resize(keys.size() - more);
    return fmt::format("{}{}", fmt::join(keys, ", "), more > 0 ? fmt::format(" and {} more", more) : "");
}

// One line for what was taken, and one for each reason to leave something out.
std::vector<std::string> notes_of(const ForeignConfig& config) {
    std::vector<std::string> notes;
    std::vector<std::string> taken;
    for (const ForeignSetting& setting : config.settings) taken.push_back(as_argument(setting));
    if (!taken.empty()) notes.push_back(fmt::format("gives {}", fmt::join(taken, " ")));
    notes.insert(notes.end(), config.notes.begin(), config.notes.end());
    if (!config.automatic.empty())
        notes.push_back(
            fmt::format("kept at our defaults, since the value is auto: {}", listed(config.automatic)));
    for (const auto& [reason, keys] : config.ignored)
        notes.push_back(fmt::format("ignored: {} ({})", listed(keys), reason));
    if (!config.unknown.empty()) notes.push_back(fmt::format("unknown keys: {}", listed(config.unknown)));
    for (std::string& note : notes) note = fmt::format("{}: {}", config.file, one_line(note));
    return notes;
}

}  // namespace

std::string ForeignOptions::with_place(std::string_view error) const {
    if (!error.starts_with("--")) return std::string(error);
    const auto place = places.find(error.substr(2, error.find_first_of(" :=", 2) - 2));
    return place == places.end() ? std::string(error) : fmt::format("{}: {}", place->second, error);
}

ForeignOptions with_foreign_options(std::vector<std::string> arguments) {
    const std::optional<std::string> file = take_file(arguments);
    if (!file) return {.arguments = std::move(arguments), .notes = {}, .places = {}};
    ForeignConfig config = naming_option("--from", [&] { return read_foreign_config(*file); });
    const Names typed = names_of_options(arguments);
    drop_overridden(config.settings, arguments, typed);
    ForeignOptions found;
    const auto place = [&] {
        for (const ForeignSetting& setting : config.settings)
            found.places[setting.option] = fmt::format("--from: {}: {}", *file, setting.key);
    };
    place();
    try {
        PlannedRun run;
        std::string help;
        const auto deferred = [&](const ForeignSetting& setting) {
            return is_deferred(setting, config.settings, arguments);
        };
        const std::vector<std::string> first = with_settings(
            arguments,
            config.settings | std::views::filter([&](const ForeignSetting& s) { return !deferred(s); }));
        if (read(run, first, help)) {
            drop_without_effect(config, run.options);
            settle_batch(config, run, typed);
        }
    } catch (const BrokenRule&) {  // a plan explains it
    } catch (const UserError& fault) {
        throw UserError(found.with_place(fault.what()));
    }
    place();
    found.arguments = with_settings(arguments, config.settings);
    found.notes = notes_of(config);
    return found;
}

}  // namespace llmc
