#include "llmc/io/weight_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "llmc/core/error.h"
#include "llmc/io/files.h"

namespace llmc {

namespace fs = std::filesystem;

namespace {

constexpr const char *one_file = "model.safetensors", *index_file = "model.safetensors.index.json";

bool holds(const fs::path& folder, const char* name) {
    std::error_code ignored;
    return fs::exists(folder / name, ignored);
}

bool has_pickles(const fs::path& folder) {
    std::error_code error;
    for (fs::directory_iterator entry(folder, error); !error && entry != fs::directory_iterator();
         entry.increment(error)) {
        const std::string ending = entry->path().extension().string();
        if (ending == ".bin" || ending == ".pt" || ending == ".pth") return true;
    }
    return false;
}

}  // namespace

bool is_model_folder(const fs::path& path) {
    return holds(path, "config.json") && !holds(path, "manifest.json") && !holds(path, "run.json");
}

WeightFiles::WeightFiles(const fs::path& path) : path_(path.string()) {
    std::error_code ignored;
    if (!fs::is_directory(path, ignored)) {
        open(path);
    } else if (holds(path, one_file)) {  // as in Hugging Face's library, also beside an index
        open(path / one_file);
        if (holds(path, index_file))
            note_ = fmt::format("{} has {}, so its {} and the files that it names are not read", path_,
                                one_file, index_file);
    } else if (holds(path, index_file)) {
        open_shards(path, path / index_file);
    } else if (has_pickles(path)) {
        user_error(
            "{} has its weights in files of torch.save only; load it with transformers, and write it with "
            "save_pretrained, which makes safetensors files",
            path_);
    } else {
        user_error("{} has neither {} nor {}; give a folder with weights", path_, one_file, index_file);
    }
}

void WeightFiles::open(const fs::path& file) {
    const auto& reader = readers_.emplace_back(std::make_unique<const SafetensorsReader>(file));
    for (const SafetensorsEntry& entry : reader->entries()) {
        if (!files_.emplace(entry.name, reader.get()).second)
            user_error("{}: {} is in two files; remove it from one of them", path_, in_quotes(entry.name));
        entries_.push_back(entry);
    }
}

void WeightFiles::open_shards(const fs::path& folder, const fs::path& index) {
    const auto json = nlohmann::json::parse(read_file(index), nullptr, false);
    const auto map = json.is_object() ? json.find("weight_map") : json.end();
    if (!json.is_object() || map == json.end() || !map->is_object() || map->empty())
        user_error("{} has no weight_map of tensors and their files; get the folder again", index.string());
    std::set<std::string> names;
    for (const auto& [tensor, file] : map->items()) {
        const std::string name = file.is_string() ? file.get<std::string>() : "";
        // A link in the folder may lead anywhere; a name may not.
        if (name.empty() || name == "." || name == ".." || fs::path(name).filename() != name)
            user_error("{}: the file of {} is {}, which is not the name of a file in this folder",
                       index.string(), in_quotes(tensor), file.dump());
        names.insert(name);
    }
    for (const std::string& name : names) open(folder / name);
    for (const auto& [tensor, file] : map->items()) {
        if (!contains(tensor))
            user_error("{}: {} has no tensor {}; get the folder again", index.string(),
                       file.get<std::string>(), in_quotes(tensor));
    }
}

const SafetensorsReader& WeightFiles::file_of(std::string_view name) const {
    const auto found = files_.find(name);
    if (found == files_.end()) user_error("{}: there is no tensor {}", path_, in_quotes(std::string(name)));
    return *found->second;
}

}  // namespace llmc
