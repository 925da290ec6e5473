#include "llmc/io/tokenizer_folder.h"

#include <algorithm>
#include <array>
#include <system_error>

#include "llmc/core/error.h"
#include "llmc/io/files.h"

namespace llmc {

namespace fs = std::filesystem;

namespace {

bool is_of_tokenizer(const std::string& name) {
    constexpr std::array beginnings = {"tokenizer", "chat_template"};
    constexpr std::array names = {"vocab.json",
                                  "vocab.txt",
                                  "vocab.bpe",
                                  "merges.txt",
                                  "encoder.json",
                                  "special_tokens_map.json",
                                  "tekken.json",
                                  "added_tokens.json",
                                  "generation_config.json",
                                  "chat_format.json",
                                  "additional_chat_templates"};
    return std::ranges::find(names, name) != names.end() ||
           std::ranges::any_of(beginnings,
                               [&](const char* beginning) { return name.starts_with(beginning); });
}

}  // namespace

bool has_tokenizer(const fs::path& folder) {
    std::error_code error;
    for (fs::directory_iterator entry(folder, error); !error && entry != fs::directory_iterator();
         entry.increment(error)) {
        const std::string name = entry->path().filename().string();
        if (is_of_tokenizer(name) && name != "generation_config.json") return true;
    }
    return false;
}

TokenizerFiles read_tokenizer_files(const fs::path& folder) {
    TokenizerFiles files;
    std::error_code error;
    for (fs::directory_iterator entry(folder, error); !error && entry != fs::directory_iterator();
         entry.increment(error)) {
        const fs::path& path = entry->path();
        const std::string name = path.filename().string();
        if (!is_of_tokenizer(name)) continue;
        if (entry->is_regular_file()) files[name] = read_file(path);
        if (!entry->is_directory()) continue;
        for (const fs::directory_entry& inner : fs::directory_iterator(path)) {
            if (inner.is_regular_file())
                files[(fs::path(name) / inner.path().filename()).string()] = read_file(inner.path());
        }
    }
    return files;
}

void write_tokenizer_files(const fs::path& folder, const TokenizerFiles& files) {
    for (const auto& [name, text] : files) {
        const fs::path file = folder / name;
        make_directory(file.parent_path());
        write_file(file, text);
    }
}

}  // namespace llmc
