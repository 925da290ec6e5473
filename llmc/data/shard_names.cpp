#include "llmc/data/shard_names.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>
#include <system_error>
#include <utility>

namespace llmc {
namespace {

enum class Split { training, validation, unknown };

constexpr std::array validation_words = {"val", "validation", "valid", "eval", "test"};

bool is_letter(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0; }

// What a shard's name says, and the word that says it, as the name spells it. The last such word decides, since
// earlier ones may belong to the name of the dataset. "val" counts only as a whole word: "interval" has it too.
std::pair<Split, std::string> split_of(const std::string& name) {
    std::pair<Split, std::string> found{Split::unknown, ""};
    for (auto begin = name.begin(); (begin = std::find_if(begin, name.end(), is_letter)) != name.end();) {
        const auto end = std::find_if_not(begin, name.end(), is_letter);
        const std::string word(begin, end);
        std::string lower = word;
        std::ranges::transform(lower, lower.begin(),
                               [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
        if (const auto at = lower.find("train"); at != std::string::npos)
            found = {Split::training, word.substr(at, 5)};
        else if (std::ranges::find(validation_words, lower) != validation_words.end())
            found = {Split::validation, word};
        begin = end;
    }
    return found;
}

// Names of token shards by what they say, sorted.
struct Names {
    std::vector<std::string> training, validation, unknown;

    void add(const std::string& name) {
        const Split split = split_of(name).first;
        (split == Split::training     ? training
         : split == Split::validation ? validation
                                      : unknown)
            .push_back(name);
    }
};

Names names_in(const std::filesystem::path& directory) {
    Names names;
    std::error_code ignored;
    std::vector<std::string> shards;
    for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
        const std::string name = entry.path().filename().string();
        if (name.ends_with(".bin") && !name.starts_with('.')) shards.push_back(name);
    }
    std::ranges::sort(shards);
    for (const std::string& name : shards) names.add(name);
    return names;
}

// A pattern that matches all of `names` whose word is that of the first one, and none of the other names: the
// simplest one. Empty if there is none.
std::string pattern_of(const std::vector<std::string>& names, const std::vector<std::string>& others,
                       const std::vector<std::string>& unknown) {
    if (names.empty()) return "";
    const std::string word = split_of(names.front()).second;
    const auto matches = [](const std::string& pattern) {
        return [&](const std::string& name) { return fnmatch(pattern.c_str(), name.c_str(), 0) == 0; };
    };
    for (const char* form : {"{}_*.bin", "*{}*.bin", "*[_.-]{}*.bin", "*{}.bin", "{}*.bin"}) {
        const std::string pattern = fmt::format(fmt::runtime(form), word);
        const bool all = std::ranges::all_of(names, [&](const std::string& name) {
            return split_of(name).second != word || matches(pattern)(name);
        });
        if (all && std::ranges::none_of(others, matches(pattern)) &&
            std::ranges::none_of(unknown, matches(pattern)))
            return pattern;
    }
    return "";
}

std::string pattern_for_training(const Names& names) {
    return pattern_of(names.training, names.validation, names.unknown);
}
std::string pattern_for_validation(const Names& names) {
    return pattern_of(names.validation, names.training, names.unknown);
}

// "a.bin", "a.bin and 2 more"
std::string first_of(const std::vector<std::string>& names) {
    return names.size() == 1 ? names[0] : fmt::format("{} and {} more", names[0], names.size() - 1);
}

}  // namespace

std::string advice_for_directory(const std::filesystem::path& directory, const std::string& option) {
    const Names names = names_in(directory);
    const bool validates = option == "--val-data";
    const std::vector<std::string>& wanted = validates ? names.validation : names.training;
    const std::vector<std::string>& others = validates ? names.training : names.validation;
    if (wanted.empty() && others.empty())
        return fmt::format("give a file in it, or its token shards as '{}' in quotes",
                           (directory / "*.bin").string());
    if (wanted.empty() && names.unknown.empty()) {
        return validates ? fmt::format(
                               "its token shards are for training by their names ({}); give "
                               "validation shards, or leave out --val-data",
                               first_of(others))
                         : fmt::format(
                               "its token shards are for validation by their names ({}); give "
                               "training shards",
                               first_of(others));
    }
    const std::string pattern = validates ? pattern_for_validation(names) : pattern_for_training(names);
    if (pattern.empty()) {
        return fmt::format("give a file in it, or a pattern in quotes that does not match {}",
                           first_of(others.empty() ? names.unknown : others));
    }
    return fmt::format("give a file in it, or its token shards as '{}' in quotes",
                       (directory / pattern).string());
}

std::string note_on_validation_shards(const std::string& pattern, std::span<const std::string> files) {
    Names names;
    for (const std::string& file : files) names.add(std::filesystem::path(file).filename().string());
    if (names.training.empty() || names.validation.empty()) return "";
    const std::filesystem::path folder = std::filesystem::path(pattern).parent_path();
    const std::string training = pattern_for_training(names), validation = pattern_for_validation(names);
    const std::string remedy =
        training.empty() || validation.empty()
            ? "to leave them out, give a pattern that does not match them"
            : fmt::format("to leave them out and validate on them, give --train-data '{}' --val-data '{}'",
                          (folder / training).string(), (folder / validation).string());
    return fmt::format("--train-data '{}' matches shards that are for validation by their names ({}); {}",
                       pattern, first_of(names.validation), remedy);
}

}  // namespace llmc
