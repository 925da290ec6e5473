#include "llmc/data/data_record.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>
#include <tuple>

#include "llmc/core/text.h"
#include "llmc/io/files.h"

namespace llmc {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FileRecord, name, bytes, tokens, ends)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(OptionRecord, files, samples)

namespace {

constexpr std::size_t end_bytes = std::size_t{64} << 10;

using Names = std::vector<std::string>;

Names names_of(const std::vector<FileRecord>& files) {
    Names names;
    for (const FileRecord& file : files) names.push_back(file.name);
    return names;
}

// Those of `names` that are not among `others`.
Names without(Names names, Names others) {
    std::ranges::sort(names);
    std::ranges::sort(others);
    Names rest;
    std::ranges::set_difference(names, others, std::back_inserter(rest));
    return rest;
}

std::string list(const Names& names) {
    if (names.empty()) return "nothing";
    return names.front() + (names.size() > 1 ? fmt::format(" and {} more", names.size() - 1) : "");
}

std::string list_with(const Names& names, std::string_view what) {
    return fmt::format("{} {} {}", list(names), names.size() > 1 ? "are" : "is", what);
}

// Empty if both give the same tokens.
std::string difference(const FileRecord& here, const FileRecord& other) {
    if (here.bytes != other.bytes)
        return fmt::format("{} has {} instead of {}", here.name, plural(here.bytes, "byte"),
                           grouped(other.bytes));
    if (here.ends != other.ends) return fmt::format("{} has other contents of the same length", here.name);
    if (here.tokens != other.tokens)
        return fmt::format(
            "{}: {} instead of {} (without --val-data, the last tenth of a training text is for "
            "validation)",
            here.name, plural(here.tokens, "token"), grouped(other.tokens));
    return "";
}

}  // namespace

FileRecord record_of(const std::string& path, std::span<const std::uint8_t> bytes, std::int64_t tokens) {
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const std::size_t size = std::min(text.size(), end_bytes);
    return {
        .name = std::filesystem::path(path).filename().string(),
        .bytes = std::ssize(text),
        .tokens = tokens,
        .ends = checksum_of_text(std::string(text.substr(0, size)).append(text.substr(text.size() - size)))};
}

std::string to_text(const DataRecord& record) {
    // A file's name may have bytes that are not UTF-8.
    return nlohmann::json(record).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

DataRecord data_record(const std::string& text) { return nlohmann::json::parse(text).get<DataRecord>(); }

std::string difference(const OptionRecord& here, const OptionRecord& others) {
    const auto contents = [](const FileRecord& file) { return std::tie(file.bytes, file.tokens, file.ends); };
    if (std::ranges::equal(here.files, others.files, {}, contents, contents)) {
        if (here.samples == others.samples) return "";
        return fmt::format("{} instead of {}", plural(here.samples, "sample"), grouped(others.samples));
    }
    const Names names = names_of(here.files), other_names = names_of(others.files);
    if (names == other_names) {
        std::size_t i = 0;
        while (difference(here.files[i], others.files[i]).empty()) ++i;
        return difference(here.files[i], others.files[i]);
    }
    const Names missing = without(other_names, names), additional = without(names, other_names);
    if (additional.size() == names.size() && missing.size() == other_names.size())
        return fmt::format("{} instead of {}", list(names), list(other_names));
    if (missing.empty() && additional.empty())
        return fmt::format("{} is at another place in the order of the files",
                           *std::ranges::mismatch(names, other_names).in1);
    if (additional.empty()) return list_with(missing, "missing");
    if (missing.empty()) return list_with(additional, "additional");
    return fmt::format("{}, and {}", list_with(missing, "missing"), list_with(additional, "additional"));
}

std::string difference(const DataRecord& here, const DataRecord& others) {
    DataRecord all = others;
    all.insert(here.begin(), here.end());
    const auto read_by = [](const DataRecord& record, const std::string& option) {
        const auto found = record.find(option);
        return found == record.end() ? OptionRecord{} : found->second;
    };
    for (const auto& [option, unused] : all) {
        const std::string what = difference(read_by(here, option), read_by(others, option));
        if (!what.empty()) return fmt::format("--{}: {}", option, what);
    }
    return "";
}

}  // namespace llmc
