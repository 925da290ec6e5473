#include "llmc/io/foreign_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "llmc/core/text.h"

namespace llmc {

namespace {

constexpr std::string_view convert_with_pytorch =
    "load it with PyTorch, and save its tensors with safetensors.torch.save_file";
constexpr std::string_view convert_with_numpy =
    "load it with NumPy, and save its arrays with safetensors.numpy.save_file";

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
    Kind{"\x93numpy", "an array of NumPy", convert_with_numpy},
    Kind{"\x1f\x8b", "compressed by gzip", "unpack it with gunzip"},
    Kind{"\x89hdf\r\n\x1a\n", "an HDF5 file", "give the safetensors file of the same model"},
    Kind{"\x88\xd8\x34\x01", "a token shard", "give it to --train-data or --val-data"},
    Kind{"\xa1\xd9\x34\x01", "a token shard", "give it to --train-data or --val-data"},
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

// Whether the first member of a zip archive is an array: its name begins at byte 30, and its length is at byte 26.
bool is_npz(std::string_view beginning) {
    if (!beginning.starts_with("PK\x03\x04") || beginning.size() < 30) return false;
    const auto length = static_cast<unsigned char>(beginning[26]);
    return beginning.substr(30, length).ends_with(".npy");
}

// The length without the last character if that may be cut: it begins at the last byte that continues none.
std::size_t whole_characters(std::string_view text) {
    std::size_t end = text.size();
    while (end > 0 && (static_cast<unsigned char>(text[end - 1]) & 0xc0) == 0x80) --end;
    return end > 0 ? end - 1 : 0;
}

bool is_text(std::string_view beginning) {
    return std::ranges::all_of(beginning,
                               [](unsigned char c) {
                                   return c >= ' ' ? c != 0x7f
                                                   : c == '\t' || c == '\n' || c == '\r' || c == '\f';
                               }) &&
           is_utf8(beginning.substr(0, whole_characters(beginning)));
}

}  // namespace

std::string recognize_foreign_file(std::string_view beginning) {
    const std::string lower = in_lower_case(beginning);
    if (lower.starts_with('{') && lower.find("\"weight_map\"") != std::string::npos)
        return fmt::format("an index of shards, without weights; {}", advice_for_shards());
    if (is_npz(beginning)) return fmt::format("an .npz file of NumPy; {}", convert_with_numpy);
    const auto kind = std::ranges::find_if(kinds, [&](const Kind& k) { return lower.starts_with(k.magic); });
    if (kind != kinds.end()) return fmt::format("{}; {}", kind->is, kind->advice);
    return is_text(beginning) ? "a text; give a .safetensors file" : "";
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

std::string advice_for_shards() { return "give the folder that holds the index, the shards and config.json"; }

}  // namespace llmc
