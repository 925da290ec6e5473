#include "llmc/train/hellaswag.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/data/tokenizer.h"
#include "llmc/data/tokenizer_files.h"
#include "llmc/device/ops.h"
#include "llmc/io/files.h"

namespace llmc {
namespace {

constexpr const char* option = "--eval-hellaswag";

// JSON can contain a lone surrogate (\ud800), which UTF-8 cannot encode. It becomes U+FFFD, as in data/ and
// in tiktoken.
std::string without_half_surrogates(std::string_view json) {
    // The unit of UTF-16 that is written at `place` as backslash, u and 4 digits; 0 if none is.
    const auto escape_at = [&](std::size_t place) {
        unsigned value = 0;
        const char* const digits = json.data() + std::min(place + 2, json.size());
        const char* const end = json.data() + std::min(place + 6, json.size());
        const bool is_one =
            json.substr(place, 2) == "\\u" && std::from_chars(digits, end, value, 16).ptr == digits + 4;
        return is_one ? value : 0;
    };
    const auto is_high = [](unsigned unit) { return unit >= 0xd800 && unit < 0xdc00; };
    const auto is_low = [](unsigned unit) { return unit >= 0xdc00 && unit < 0xe000; };
    std::string result;
    for (std::size_t i = 0; i < json.size();) {
        const unsigned unit = escape_at(i);
        std::size_t taken = unit != 0 ? 6 : json[i] == '\\' ? 2 : 1;
        const bool is_pair = is_high(unit) && is_low(escape_at(i + 6));
        if (is_pair) taken = 12;
        if (!is_pair && (is_high(unit) || is_low(unit))) {
            result += "\\ufffd";
        } else {
            result += json.substr(i, taken);
        }
        i += taken;
    }
    return result;
}

// The content of a line. parse throws UserError with the reason if the line is not an example.
struct Line {
    std::string context;
    std::vector<std::string> endings;
    std::size_t label;
};
Line parse(std::string_view text) {
    nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
    if (json.is_discarded()) json = nlohmann::json::parse(without_half_surrogates(text), nullptr, false);
    if (!json.is_object()) user_error("not a JSON object");
    const auto ctx = json.find("ctx"), endings = json.find("endings"), label = json.find("label");
    const auto is_text = [](const nlohmann::json& value) {
        return value.is_string() && !value.get_ref<const std::string&>().empty();
    };
    if (ctx == json.end() || !is_text(*ctx)) user_error("\"ctx\" is missing, empty or not a string");
    if (endings == json.end() || !endings->is_array() || endings->size() != HellaSwag::endings ||
        !std::ranges::all_of(*endings, is_text))
        user_error("\"endings\" is not a list of {} non-empty strings", HellaSwag::endings);
    if (label == json.end()) user_error("no \"label\" (those of the test set are not public)");
    // Some copies of the examples have it as a text.
    const auto number = label->is_number_unsigned() ? std::optional(label->get<std::uint64_t>())
                        : label->is_string()        ? whole_number<std::uint64_t>(label->get<std::string>())
                                                    : std::nullopt;
    if (!number || *number >= HellaSwag::endings)
        user_error("\"label\" is not 0 to {}", HellaSwag::endings - 1);
    return {*ctx, *endings, *number};
}

}  // namespace

HellaSwag::HellaSwag(const std::string& path, std::int64_t limit, const Model& model,
                     const Tokenizer* tokenizer)
    : sequence_length_(static_cast<std::size_t>(model.sequence_length)) {
    if (!tokenizer) {
        user_error("{}: no tokenizer for a vocabulary of {}; {}; or try --vocab-size 256 (bytes)", option,
                   model.vocabulary, advice_for_tokenizer(model.vocabulary));
    }
    const std::string text = naming_option(option, [&] { return read_file(path); });
    std::int64_t number = 0;
    for (std::string_view rest = text; !rest.empty() && (limit == 0 || examples() < limit);) {
        const std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(std::min(line.size() + 1, rest.size()));
        number += 1;
        if (line.find_first_not_of(" \r\t") == std::string_view::npos) continue;
        try {
            const Line parsed = parse(line);
            Example& example = examples_.emplace_back();
            example.context = tokenizer->encode_ordinary(parsed.context);
            if (example.context.empty())
                user_error("the tokenizer has no token for any character of its ctx");
            for (std::size_t i = 0; i < endings; ++i)
                example.ending[i] = tokenizer->encode_ordinary(" " + parsed.endings[i]);
            example.label = parsed.label;
        } catch (const UserError& fault) {
            user_error(
                "{}: '{}', line {}: {}; give a file in HellaSwag's format, such as its hellaswag_val.jsonl",
                option, path, number, fault.what());
        }
    }
    if (examples_.empty())
        user_error("{}: '{}' has no examples; give a file in HellaSwag's format", option, path);
    const std::span bytes(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
    record_ = {.files = {record_of(path, bytes, 0)}, .samples = examples()};
}

std::size_t HellaSwag::targets_of(const Example& example, std::size_t ending) const {
    return std::min(example.ending[ending].size(), sequence_length_);
}

void HellaSwag::read(std::int64_t row, std::span<std::int32_t> inputs,
                     std::span<std::int32_t> targets) const {
    const auto place = static_cast<std::size_t>(row);
    const Example& example = examples_.at(place / endings);
    const std::vector<std::int32_t>& ending = example.ending[place % endings];
    std::vector<std::int32_t> tokens = example.context;
    tokens.insert(tokens.end(), ending.begin(), ending.end());
    const std::size_t kept = std::min(tokens.size(), sequence_length_ + 1),
                      scored = targets_of(example, place % endings);
    const std::span last = std::span(tokens).last(kept);

    std::ranges::fill(inputs, 0);
    std::ranges::fill(targets, ignored_target);
    std::ranges::copy(last.first(kept - 1), inputs.begin());
    std::ranges::copy(last.last(scored), targets.begin() + static_cast<std::ptrdiff_t>(kept - 1 - scored));
}

HellaSwagScore HellaSwag::score(std::span<const double> row_losses) const {
    check(std::ssize(row_losses) == rows(), "one loss per row");
    HellaSwagScore score{.examples = examples()};
    for (std::size_t i = 0; i < examples_.size(); ++i) {
        const std::span sums = row_losses.subspan(i * endings, endings);
        std::array<double, endings> means{};
        for (std::size_t k = 0; k < endings; ++k)
            means[k] = sums[k] / static_cast<double>(targets_of(examples_[i], k));
        const auto is_right = [&](const auto& losses) {
            return std::ranges::min_element(losses) - losses.begin() ==
                   static_cast<std::ptrdiff_t>(examples_[i].label);
        };
        if (is_right(sums)) score.accuracy += 1;
        if (is_right(means)) score.accuracy_norm += 1;
    }
    score.accuracy /= static_cast<double>(examples());
    score.accuracy_norm /= static_cast<double>(examples());
    return score;
}

}  // namespace llmc
