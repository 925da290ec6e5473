#include "llmc/train/algorithms.h"

#include <fmt/format.h>

#include <cstdlib>
#include <map>
#include <sstream>
#include <system_error>

#include "llmc/core/error.h"
#include "llmc/io/files.h"

namespace llmc {

namespace {

namespace fs = std::filesystem;

// The keys are the kind of device, then the operation.
using Choices = std::map<std::string, std::map<std::string, std::string>>;

Choices parse(std::string_view text) {
    Choices choices;
    std::istringstream lines{std::string(text)};
    std::map<std::string, std::string>* choices_of_kind = nullptr;
    for (std::string line; std::getline(lines, line);) {
        const std::size_t colon = line.find(':');
        if (line.empty()) {
            choices_of_kind = nullptr;
        } else if (!choices_of_kind) {
            choices_of_kind = &choices[line];
        } else if (colon != std::string::npos) {
            (*choices_of_kind)[line.substr(0, colon)] = line.substr(colon);
        }
    }
    return choices;
}

std::string to_text(const Choices& choices) {
    std::string text;
    for (const auto& [kind, choices_of_kind] : choices) {
        if (choices_of_kind.empty()) continue;
        text += (text.empty() ? "" : "\n") + kind + "\n";
        for (const auto& [what, choice] : choices_of_kind) text += what + choice + "\n";
    }
    return text;
}

// The text of a file; empty if the file does not exist or cannot be read.
std::string text_of(const fs::path& file) {
    try {
        std::error_code error;
        return fs::is_regular_file(file, error) ? read_file(file) : "";
    } catch (const UserError&) {
        return {};
    }
}

}  // namespace

fs::path algorithms_cache() {
    const auto variable = [](const char* name) {
        const char* const value = std::getenv(name);
        return fs::path(value ? value : "");
    };
    // The XDG Base Directory Specification says to ignore a relative path.
    const fs::path caches = variable("XDG_CACHE_HOME"), home = variable("HOME");
    if (caches.is_absolute()) return caches / "train_gpt" / algorithms_file;
    if (home.is_absolute()) return home / ".cache" / "train_gpt" / algorithms_file;
    user_error("neither XDG_CACHE_HOME nor HOME is set");
}

std::string merged_choices(std::string_view first, std::string_view second) {
    Choices merged = parse(first);
    for (const auto& [kind, choices_of_kind] : parse(second)) {
        for (const auto& [what, choice] : choices_of_kind) merged[kind][what] = choice;
    }
    return to_text(merged);
}

std::string added_choices(std::string_view first, std::string_view second) {
    Choices before = parse(first), added;
    for (const auto& [kind, choices_of_kind] : parse(second)) {
        for (const auto& [what, choice] : choices_of_kind) {
            if (before[kind][what] != choice) added[kind][what] = choice;
        }
    }
    return to_text(added);
}

std::int64_t number_of_choices(std::string_view text) {
    std::size_t number = 0;
    for (const auto& [kind, choices_of_kind] : parse(text)) number += choices_of_kind.size();
    return static_cast<std::int64_t>(number);
}

std::string kind_of_choices(const Device& device) {
    const std::string text = device.choices();
    return text.substr(0, text.find('\n'));
}

std::string Algorithms::row() const {
    if (!origin.empty()) return fmt::format("from {}; missing ones are autotuned", origin.string());
    return cache.empty() ? fmt::format("autotuned now, not saved: {}", why_not_kept)
                         : fmt::format("autotuned now, saved in {}", cache.string());
}

Algorithms find_algorithms(const std::optional<CheckpointInfo>& checkpoint, const fs::path& out_dir,
                           const Device& device) {
    Algorithms found;
    const std::string kind = kind_of_choices(device);
    if (kind.empty()) return found;
    const auto take = [&](const std::string& text, const fs::path& origin) {
        if (found.origin.empty() && !parse(text)[kind].empty()) found.origin = origin;
        found.earlier = merged_choices(text, found.earlier);
    };
    if (checkpoint) take(checkpoint->device_choices, checkpoint->directory);
    const fs::path own = out_dir / algorithms_file;
    take(text_of(own), own);
    try {
        const fs::path cache = algorithms_cache();
        take(text_of(cache), cache);
        require_replaceable_file(cache);
        found.cache = cache;
    } catch (const UserError& fault) {
        found.why_not_kept = fault.what();
    }
    return found;
}

std::int64_t keep_algorithms(const Algorithms& found, std::string_view choices, std::string_view name) {
    const std::string added = added_choices(found.earlier, choices);
    if (added.empty() || found.cache.empty()) return number_of_choices(added);
    try {
        make_directory(found.cache.parent_path());
        // Other runs may write at the same time. Each writes a file of its own and renames it, so no reader
        // sees half a file.
        replace_file(found.cache, merged_choices(text_of(found.cache), added), fmt::format(".{}", name));
    } catch (const UserError&) {
        // The next run measures again.
    }
    return number_of_choices(added);
}

}  // namespace llmc
