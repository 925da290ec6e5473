#include "llmc/io/foreign_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>

namespace llmc {

namespace {

constexpr std::string_view convert_with_pytorch =
    "load it with PyTorch, and save its tensors with safetensors.torch.save_file";

// A file of another kind begins with `magic`, in lower case.
struct Kind {
    std::string_view magic, is, advice;
};
constexpr std::array kinds = {
    Kind{"pk\x03\x04", "a zip archive, as torch.save writes", convert_with_pytorch},
    Kind{"\x80\x02", "a pickle of Python", convert_with_pytorch},
    Kind{"\x80\x03", "a pickle of Python", convert_with_pytorch},
    Kind{"\x80\x04", "a pickle of Python", convert_with_pytorch},
    Kind{"\x80\x05", "a pickle of Python", convert_with_pytorch},
    Kind{"gguf", "a GGUF file", "give the safetensors file of the same model"},
    Kind{"version https://git-lfs", "only a pointer to a file in Git LFS", "get the file with git lfs pull"},
    Kind{"<!doctype html", "a web page", "download the file itself"},
    Kind{"<html", "a web page", "download the file itself"},
    Kind{"{", "a JSON file", "give the .safetensors file beside it"},
};

std::string in_lower_case(std::string_view text) {
    std::string lower(text);
    std::ranges::transform(lower, lower.begin(),
                           [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return lower;
}

}  // namespace

std::string recognize_foreign_file(std::string_view beginning) {
    const std::string lower = in_lower_case(beginning);
    if (lower.starts_with('{') && lower.find("\"weight_map\"") != std::string::npos)
        return fmt::format("an index of shards, without weights; {}", advice_for_shards());
    const auto kind = std::ranges::find_if(kinds, [&](const Kind& k) { return lower.starts_with(k.magic); });
    return kind == kinds.end() ? "" : fmt::format("{}; {}", kind->is, kind->advice);
}

bool is_one_of_several_shards(const std::filesystem::path& path) {
    const std::string name = path.stem().string();  // model-00001-of-00002
    constexpr std::string_view pattern = "-00000-of-00000";
    if (name.size() < pattern.size()) return false;
    const std::string_view end = std::string_view(name).substr(name.size() - pattern.size());
    return std::ranges::equal(end, pattern, [](unsigned char c, char p) {
        return p == '0' ? std::isdigit(c) != 0 : c == static_cast<unsigned char>(p);
    });
}

std::string advice_for_shards() {
    return "give one file with all tensors, as transformers writes with "
           "save_pretrained(FOLDER, max_shard_size=\"1TB\")";
}

}  // namespace llmc
