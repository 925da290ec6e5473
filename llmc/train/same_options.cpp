#include "llmc/train/same_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/train/command_line.h"
#include "llmc/train/same_on_ranks.h"
#include "llmc/train/settings.h"

namespace llmc {

namespace {

// These options may differ. The settings in a --config are compared, and not its name. The others change only
// what is printed. (--cuda-sync is not among them: it changes how GPUs compute.)
bool may_differ(std::string_view name) {
    constexpr std::array names = {"config", "log-every", "quiet", "verbose"};
    return std::ranges::find(names, name) != names.end();
}

// A value as it follows the name of its option. Machines may have the same file in different places.
template <class T>
std::string shown(std::string_view name, const T& value, const Help& help) {
    if constexpr (is_switch<T>) {
        return value_of(value) ? "" : "=false";
    } else {
        if (is_name_of_file(name, help)) return fmt::format(" {}", help.value);
        return fmt::format(" {}", shell_word(fmt::format("{}", value_of(value))));
    }
}

// Whether a file or folder on one rank alone would change what the ranks do. Data are compared when they are read
// (same_data.h), and results are rank 0's.
bool is_needed_by_all(std::string_view name) {
    constexpr std::array names = {"init", "lora", "eval-hellaswag", "export"};
    return std::ranges::find(names, name) != names.end();
}

// What follows the name of each mode that was given, and of each setting: its value, given or not. Before all ranks
// have found the same checkpoint, only given settings are compared: it may appear between two ranks' looks.
nlohmann::json options_of_rank(const Options* options, bool has_checkpoint) {
    if (options == nullptr) return {{"help or --version", ""}};
    const Options& o = *options;
    auto found = nlohmann::json::object();
    for (const std::string& name : o.given)
        if (!may_differ(name)) found[name] = "";
    const bool may_change = !has_checkpoint && (o.resume || o.resume_if_any);
    for_each_setting(o, no_group, [&](const char* name, const auto& value, const Help& help, const Choices&) {
        found.erase(name);
        if (may_differ(name) || is_unset(value)) return;
        if (may_change && !o.given.contains(name) && !o.lines.contains(name)) return;
        const bool is_path = name != std::string_view("model") && is_name_of_file(name, help);
        if (!is_path || is_needed_by_all(name)) found[name] = shown(name, value, help);
    });
    // Names that stand for other values.
    if (found.contains("model"))
        found["model"] = fmt::format(" {}", o.model_folder.empty() ? o.model : "DIR");
    if (found.contains("zero-stage") && o.shards_on_machine) found["zero-stage"] = " HYBRID_SHARD";
    return found;
}

// The options of two ranks, modes first: a mode excludes settings, so it explains more than they do.
std::vector<std::string> names_of(nlohmann::json some, const nlohmann::json& others) {
    some.update(others);
    std::vector<std::string> settings, names;
    const Options defaults;
    for_each_setting(defaults, no_group, [&](const char* name, const auto&, const Help&, const Choices&) {
        if (some.erase(name) > 0) settings.emplace_back(name);
    });
    for (const auto& [mode, unused] : some.items()) names.push_back(mode);
    names.insert(names.end(), settings.begin(), settings.end());
    return names;
}

// "--lr 0.001", or "no --lr".
std::string option_in(const nlohmann::json& found, const std::string& name) {
    return found.contains(name) ? fmt::format("--{}{}", name, found[name].get<std::string>())
                                : fmt::format("no --{}", name);
}

}  // namespace

void require_same_options(Communicator& world, const Options* options, bool has_checkpoint) {
    const auto refuse = [](const DifferentRank& different) {
        const auto here = nlohmann::json::parse(different.has.text),
                   there = nlohmann::json::parse(different.other_has);
        for (const std::string& name : names_of(here, there)) {
            const std::string own = option_in(here, name), other = option_in(there, name);
            if (own != other)
                user_error("rank {} has {}, and rank {} has {}; give all processes the same options",
                           different.rank, own, different.other, other);
        }
    };
    for_each_different_rank(world, {.text = options_of_rank(options, has_checkpoint).dump()}, refuse);
}

}  // namespace llmc
