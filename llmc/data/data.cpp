#include "llmc/data/data.h"

#include <fmt/format.h>
#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/data/samples.h"
#include "llmc/data/shard_names.h"
#include "llmc/data/stories/stories.h"
#include "llmc/data/text_file.h"

namespace llmc {
namespace {

using nlohmann::literals::operator""_json_pointer;

constexpr std::int64_t unigram_limit = 100'000'000;

std::vector<std::string> matching_files(const std::string& pattern, const std::string& option) {
    std::error_code ignored;
    // A file's name may itself contain the characters of a pattern.
    if (std::filesystem::exists(pattern, ignored)) return {pattern};
    glob_t matches{};
    const int failure = glob(pattern.c_str(), GLOB_TILDE, nullptr, &matches);
    std::vector<std::string> files(matches.gl_pathv, matches.gl_pathv + matches.gl_pathc);
    globfree(&matches);
    if (failure == 0) {
        std::ranges::sort(files);
        return files;
    }
    if (pattern.find_first_of("*?[") == std::string::npos) return {pattern};
    throw MissingFile(fmt::format(
        "{}: no file matches '{}'; give a text file, or token shards as 'PATTERN*.bin' in quotes (the "
        "scripts in data/ make them)",
        option, pattern));
}

// Some systems write names in capitals.
bool is_shard(const std::string& file) {
    std::string lower = file;
    std::ranges::transform(lower, lower.begin(),
                           [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return lower.ends_with(".bin");
}

// Some editors write this mark at the beginning of a text; it is no part of the text.
constexpr std::array<std::uint8_t, 3> byte_order_mark = {0xef, 0xbb, 0xbf};

// A text, or token shards.
struct Found {
    std::optional<Text> text;
    std::vector<std::string> files;
    bool has_mark = false;  // the text without its byte order mark
};

Found find(const std::string& pattern, const std::string& option) {
    const std::vector<std::string> files = matching_files(pattern, option);
    const auto shards = std::ranges::count_if(files, is_shard);
    if (shards == std::ssize(files)) return {{}, files};
    if (files.size() > 1) {
        user_error(
            "{}: '{}' matches {} files, {} of them token shards (*.bin); give token shards only, or one text "
            "file",
            option, pattern, files.size(), shards);
    }
    const auto file = std::make_shared<const MappedFile>(files[0], option);
    const std::span<const std::uint8_t> bytes = file->bytes();
    require_text(files[0], bytes, option);
    const bool has_mark =
        std::ranges::equal(bytes.first(std::min(bytes.size(), byte_order_mark.size())), byte_order_mark);
    const std::size_t begin = has_mark ? byte_order_mark.size() : 0;
    if (begin == bytes.size())
        user_error("{}: '{}' has only a byte order mark; give a file with text", option, files[0]);
    return {Text{files[0], file, bytes.subspan(begin), static_cast<std::int64_t>(begin), file}, files,
            has_mark};
}

Text embedded_stories(const std::shared_ptr<const Stories>& stories) {
    const std::string& text = stories->text();
    return {
        "the embedded stories", stories, {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()}};
}

// The number of bytes at the beginning of a text that are for training, if the rest is for validation.
std::size_t training_bytes(const Text& text) { return text.bytes.size() * 9 / 10; }

Text part(const Text& text, std::size_t begin, std::size_t end) {
    return {text.name,
            text.owner,
            text.bytes.subspan(begin, end - begin),
            text.position + static_cast<std::int64_t>(begin),
            text.file,
            text.bytes};
}

// The tokenizer of token shards, according to the manifest that the scripts in data/ write next to them. Empty
// if it does not say; adds a note if it cannot be read.
std::string tokenizer_of(Data& data, const std::vector<std::string>& shards) {
    const std::filesystem::path path = std::filesystem::path(shards.at(0)).parent_path() / "manifest.json";
    std::error_code ignored;
    if (!std::filesystem::exists(path, ignored)) return "";
    std::ifstream file(path);
    const auto manifest = nlohmann::json::parse(file, nullptr, false);
    if (!manifest.is_object()) {
        data.notes.push_back(
            fmt::format("{} cannot be read as JSON in UTF-8, so the tokenizer of the shards is not known",
                        path.string()));
        return "";
    }
    const auto tokenizer = "/settings/tokenizer"_json_pointer;
    return manifest.contains(tokenizer) && manifest[tokenizer].is_string() ? manifest[tokenizer] : "";
}

// Whether the first tokens of the first shards are all below 256. Other tokenizers' texts have larger tokens.
bool look_like_bytes(const TokenSource& source) {
    constexpr std::size_t most_shards = 8;
    constexpr std::int64_t most_tokens = 1 << 16;
    for (std::size_t shard = 0; shard < std::min(source.shards(), most_shards); ++shard) {
        std::vector<std::int32_t> tokens(
            static_cast<std::size_t>(std::min(source.tokens(shard), most_tokens)));
        source.read(shard, 0, tokens);
        if (std::ranges::any_of(tokens, [](std::int32_t token) { return token >= 256; })) return false;
    }
    return true;
}

// Adds a note if tokens are bytes and the vocabulary is larger. Training on them works, but gives a model of
// bytes with GPT-2's size.
void note_bytes(Data& data, const std::string& pattern, const Found& found, const TokenSource& source,
                std::int64_t vocabulary) {
    if (vocabulary <= 256) return;
    std::string what = "has 256 different tokens (bytes)";
    if (!found.text) {
        const std::string tokenizer = tokenizer_of(data, found.files);
        if (tokenizer.empty() && look_like_bytes(source))
            what = "looks like bytes (its first tokens are all below 256)";
        else if (tokenizer != "bytes")
            return;
    }
    const std::string remedy =
        found.text ? fmt::format("`python data/text.py {}` converts it to GPT-2's tokens", pattern)
                   : "without --tokenizer bytes, the scripts in data/ make GPT-2's tokens";
    data.notes.push_back(fmt::format("{} {}, but the vocabulary is {}; {}, and --model mini is for bytes",
                                     pattern, what, grouped(vocabulary), remedy));
}

// Adds a note if shards have 16-bit tokens and the vocabulary has larger ones. Tokens of a smaller tokenizer are right;
// those of a larger one have been cut.
void note_narrow_tokens(Data& data, const std::string& pattern, const TokenSource& source,
                        std::int64_t vocabulary) {
    constexpr std::int64_t most = 1 << 16;
    const std::int64_t narrow = source.shards_of_16_bits();
    if (narrow == 0 || vocabulary <= most) return;
    data.notes.push_back(fmt::format(
        "{} has {} of 16-bit tokens, none above {}, but the vocabulary is {}; if the tokenizer has "
        "more, write shards of 32-bit tokens (their header begins with 20240801 and 7)",
        pattern, plural(narrow, "token shard"), grouped(most - 1), grouped(vocabulary)));
}

// Token shards made with another tokenizer than the model's, or with several, are refused.
void require_tokenizer(Data& data, const std::vector<std::string>& files, const TokenSource& source,
                       const DataOptions& options, const char* option) {
    for (std::size_t shard = 0; shard < source.shards(); ++shard) {
        const std::uint64_t made_with = source.tokenizer_of(shard);
        if (made_with == 0 || made_with == data.tokenizer) continue;
        if (options.has_unusable_tokenizer)
            user_error(
                "{}: '{}' says by which tokenizer it was made, and that of the model's folder cannot be "
                "used, so "
                "nobody knows whether they are the same; give the folder of a whole one with --tokenizer",
                option, files[shard]);
        if (options.tokenizer != 0) {
            user_error(
                "{}: '{}' was made with another tokenizer than the model's: its checksum is {:016x}, and not "
                "{:016x}; "
                "make it again with `--tokenizer` and the folder of the model's, or give the model of its "
                "tokenizer",
                option, files[shard], made_with, options.tokenizer);
        }
        if (data.tokenizer != 0)
            user_error(
                "{}: '{}' was made with another tokenizer than the shards before it; make them with the same",
                option, files[shard]);
        data.tokenizer = made_with;
    }
}

// Adds a note if shards do not say which tokenizer made them.
void note_silent_shards(Data& data, const std::string& pattern, const TokenSource& source,
                        const DataOptions& options) {
    std::int64_t silent = 0;
    for (std::size_t shard = 0; shard < source.shards(); ++shard)
        silent += source.tokenizer_of(shard) == 0 ? 1 : 0;
    if (silent == 0 || options.tokenizer == 0) return;
    data.notes.push_back(
        fmt::format("{} has {} that {} not say which tokenizer made {}; the model's is assumed", pattern,
                    plural(silent, "token shard"), silent == 1 ? "does" : "do", silent == 1 ? "it" : "them"));
}

std::string describe(const std::string& what, const TokenSource& source) {
    std::string tokens = fmt::format("{}, {}", what, plural(source.tokens(), "token"));
    if (source.rows().empty()) return tokens;
    std::int64_t targets = 0;
    for (const Row& row : source.rows()) targets += row.targets;
    return fmt::format("{} in {}, of which {} count", tokens,
                       plural(std::ssize(source.rows()), "conversation"), grouped(targets));
}

// A row is one sample.
void require_rows(const std::vector<std::string>& files, const TokenSource& source,
                  std::int64_t sequence_length, const char* option) {
    std::int64_t longest = 0;
    for (const Row& row : source.rows()) longest = std::max(longest, row.tokens);
    for (const Row& row : source.rows()) {
        const std::string& file = files[row.shard];
        if (row.targets == 0) {
            user_error(
                "{}: the conversation at token {} of '{}' has no token that the loss counts; leave it out",
                option, row.first, file);
        }
        if (row.tokens > sequence_length + 1) {
            user_error(
                "{}: the conversation at token {} of '{}' has {}, more than --seq-len {} and one more; give "
                "--seq-len {}, or "
                "make them shorter with `python data/chat.py --max-tokens {}`",
                option, row.first, file, plural(row.tokens, "token"), sequence_length, longest - 1,
                sequence_length + 1);
        }
    }
}

std::string shards_text(const std::string& pattern, std::size_t count) {
    return count == 1 ? "token shard " + pattern : std::to_string(count) + " token shards " + pattern;
}

// The number of occurrences of each token of the vocabulary.
std::vector<std::int64_t> count_tokens(const TokenSource& source, std::int64_t vocabulary) {
    std::vector<std::int64_t> counts(static_cast<std::size_t>(vocabulary));
    std::vector<std::int32_t> block(1 << 16);
    for (std::size_t shard = 0; shard < source.shards(); ++shard) {
        const std::int64_t tokens = source.tokens(shard);
        for (std::int64_t first = 0; first < tokens; first += std::ssize(block)) {
            const auto count =
                static_cast<std::size_t>(std::min<std::int64_t>(std::ssize(block), tokens - first));
            const std::span<std::int32_t> out(block.data(), count);
            source.read(shard, first, out);
            for (const std::int32_t token : out) ++counts[static_cast<std::size_t>(token)];
        }
    }
    return counts;
}

double unigram_loss(const TokenSource& training, const TokenSource& measured, std::int64_t vocabulary) {
    const std::vector<std::int64_t> seen = count_tokens(training, vocabulary);
    const std::vector<std::int64_t> counts = count_tokens(measured, vocabulary);
    const auto total = static_cast<double>(training.tokens() + vocabulary);
    double nats = 0;
    for (std::size_t token = 0; token < counts.size(); ++token) {
        nats -= static_cast<double>(counts[token]) * std::log(static_cast<double>(seen[token] + 1) / total);
    }
    return nats / static_cast<double>(measured.tokens());
}

// The records of the files of `source`: a text, of which it may be a part, or token shards.
std::vector<FileRecord> records_of(const Found& found, const TokenSource& source, const std::string& option) {
    if (found.text) {
        const Text& text = *found.text;
        return {record_of(text.name, text.file ? text.file->bytes() : text.bytes, source.tokens())};
    }
    std::vector<FileRecord> records;
    for (const std::string& file : found.files)
        records.push_back(record_of(file, MappedFile(file, option).bytes(), source.tokens(records.size())));
    return records;
}

void take_files(Data& data, const std::string& pattern, const Found& found, const TokenSource& source,
                const DataOptions& options) {
    data.files.insert(data.files.end(), found.files.begin(), found.files.end());
    const std::size_t notes = data.notes.size();
    note_bytes(data, pattern, found, source, options.vocabulary);
    note_narrow_tokens(data, pattern, source, options.vocabulary);
    if (!found.text && data.notes.size() == notes) note_silent_shards(data, pattern, source, options);
    if (found.text) {
        const std::string note = note_if_no_text(pattern, found.text->bytes);
        if (!note.empty()) data.notes.push_back(note);
    }
    if (found.has_mark)
        data.notes.push_back(
            fmt::format("{} begins with a UTF-8 byte order mark, which is skipped", pattern));
}

// A file may have several names, which lead to the same device and inode.
void refuse_common_file(const std::vector<std::string>& training, const Found& validation) {
    const auto identity = [](const std::string& file) {
        struct stat status {};
        const bool exists = stat(file.c_str(), &status) == 0;
        return exists ? std::optional(std::pair(status.st_dev, status.st_ino)) : std::nullopt;
    };
    std::set<std::pair<dev_t, ino_t>> known;
    for (const std::string& file : training) {
        if (const auto found = identity(file)) known.insert(*found);
    }
    for (const std::string& file : validation.files) {
        const auto found = identity(file);
        if (found && known.contains(*found)) {
            user_error(
                "--val-data: '{}' is in --train-data too, so the model would train on its validation data; "
                "{}",
                file,
                validation.text ? "leave out --val-data, and the last 10% of the text is for validation"
                                : "give other files, such as 'train_*.bin' and 'val_*.bin'");
        }
    }
}

void record_training(Data& data, const Found& found, std::int64_t sequence_length) {
    data.record["train-data"] = {.files = records_of(found, *data.training, "--train-data"),
                                 .samples = training_windows(*data.training, sequence_length)};
}

void record_validation(Data& data, const Found& found, std::int64_t sequence_length) {
    data.record["val-data"] = {.files = records_of(found, *data.validation, "--val-data"),
                               .samples = ValidationWindows(*data.validation, sequence_length).windows()};
}

// The text would be read as bytes, but the model's tokens are others.
void refuse_text_for_folder(const DataOptions& options, const char* option) {
    if (options.folder.empty()) return;
    user_error(
        "{}: the model of {} has its own tokenizer, and a text here is read as bytes; make token shards of "
        "it with "
        "`python data/text.py FILE --tokenizer {}`, and give them as 'PATTERN*.bin' in quotes",
        option, options.folder, options.folder);
}

void open_training(Data& data, const DataOptions& options) {
    const bool embedded = options.train_data.empty();
    std::shared_ptr<const Stories> stories;
    Found found;
    if (embedded) {
        stories = std::make_shared<const Stories>(embedded_stories_seed, embedded_stories_bytes);
        found.text = embedded_stories(stories);
    } else {
        found = find(options.train_data, "--train-data");
    }
    if (!found.text) {
        const std::string note = note_on_validation_shards(options.train_data, found.files);
        if (options.trains && options.val_data.empty() && !note.empty()) data.notes.push_back(note);
        data.training = open_token_shards(found.files, options.vocabulary, "--train-data");
        require_tokenizer(data, found.files, *data.training, options, "--train-data");
        require_rows(found.files, *data.training, options.sequence_length, "--train-data");
        take_files(data, options.train_data, found, *data.training, options);
        data.training_description =
            describe(shards_text(options.train_data, found.files.size()), *data.training);
        record_training(data, found, options.sequence_length);
        return;
    }

    refuse_text_for_folder(options, "--train-data");
    const Text& text = *found.text;
    const std::size_t all = text.bytes.size();
    const std::size_t cut = options.val_data.empty() ? training_bytes(text) : all;
    data.training = make_text_source(part(text, 0, cut), options.vocabulary);
    if (!embedded) take_files(data, options.train_data, found, *data.training, options);
    data.training_description = describe((cut < all ? "first 90% of " : "") + text.name, *data.training);
    record_training(data, found, options.sequence_length);
    if (cut == all) return;
    data.validation = make_text_source(part(text, cut, all), options.vocabulary);
    data.validation_description = describe("last 10% of " + text.name, *data.validation);
    record_validation(data, found, options.sequence_length);
    if (stories) data.source_entropy = stories->entropy(cut, all);
}

void open_validation(Data& data, const DataOptions& options) {
    const Found found = find(options.val_data, "--val-data");
    if (options.trains) refuse_common_file(data.files, found);
    if (found.text) {
        refuse_text_for_folder(options, "--val-data");
        data.validation = make_text_source(*found.text, options.vocabulary);
        data.validation_description = describe(found.text->name, *data.validation);
    } else {
        data.validation = open_token_shards(found.files, options.vocabulary, "--val-data");
        require_tokenizer(data, found.files, *data.validation, options, "--val-data");
        require_rows(found.files, *data.validation, options.sequence_length, "--val-data");
        data.validation_description =
            describe(shards_text(options.val_data, found.files.size()), *data.validation);
    }
    take_files(data, options.val_data, found, *data.validation, options);
    record_validation(data, found, options.sequence_length);
}

// "2 of 3 shards, 12 tokens: a sample needs 17 tokens in a row (--seq-len 16 and one more)".
std::string too_short(const TokenSource& source, std::int64_t sequence_length) {
    if (!source.rows().empty()) return "";
    std::int64_t count = 0, tokens = 0;
    for (std::size_t shard = 0; shard < source.shards(); ++shard) {
        if (source.tokens(shard) > sequence_length) continue;
        ++count;
        tokens += source.tokens(shard);
    }
    if (count == 0) return "";
    return fmt::format("{} of {}, {}: a sample needs {} in a row (--seq-len {} and one more)", grouped(count),
                       plural(static_cast<std::int64_t>(source.shards()), "shard"), plural(tokens, "token"),
                       plural(sequence_length + 1, "token"), sequence_length);
}

void count_training_windows(Data& data, const DataOptions& options) {
    const std::int64_t T = options.sequence_length, windows = training_windows(*data.training, T);
    if (windows == 0) {
        user_error(
            "--train-data is too short: {}; a sample needs {} in a row (--seq-len {} and one more); give "
            "more text or a smaller --seq-len",
            data.training_description, plural(T + 1, "token"), T);
    }
    if (windows < options.sequences && !data.training->rows().empty()) {
        user_error(
            "--train-data is too short: {}; one step needs {}; give more, or a --global-batch-tokens of at "
            "most {}",
            data.training_description, plural(options.sequences, "conversation"), windows * T);
    }
    if (windows < options.sequences) {
        user_error(
            "--train-data is too short: {}, or {} of --seq-len {}; one step needs {}; give more text, or a "
            "--global-batch-tokens of at most {}",
            data.training_description, plural(windows, "sequence"), T, options.sequences, windows * T);
    }
    data.epoch_tokens = windows * T;
    data.too_short = too_short(*data.training, T);
}

}  // namespace

Data open_data(const DataOptions& options) {
    Data data;
    data.tokenizer = options.tokenizer;
    const bool has_training = options.trains || !options.train_data.empty() || options.folder.empty();
    if (has_training) {
        open_training(data, options);
        count_training_windows(data, options);
    } else {
        data.training = make_text_source({}, options.vocabulary);
    }
    if (!options.val_data.empty()) open_validation(data, options);
    if (data.validation && ValidationWindows(*data.validation, options.sequence_length).windows() == 0) {
        user_error(
            "{}: {}; give at least 2 tokens",
            options.val_data.empty() ? "--train-data is too short to validate on" : "--val-data is too short",
            data.validation_description);
    }
    const std::int64_t tokens = data.training->tokens() + (data.validation ? data.validation->tokens() : 0);
    const bool has_rows =
        !data.training->rows().empty() || (data.validation && !data.validation->rows().empty());
    if (has_training && tokens <= unigram_limit && !has_rows) {
        data.unigram_loss = unigram_loss(*data.training, data.validation ? *data.validation : *data.training,
                                         options.vocabulary);
    }
    return data;
}

}  // namespace llmc
