#include "llmc/io/stored_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/files.h"

namespace llmc {

namespace fs = std::filesystem;

namespace {

using Json = nlohmann::json;

constexpr const char *one_file = "model.safetensors", *index_file = "model.safetensors.index.json",
                     *extension = ".safetensors";

bool is_folder_at(const fs::path& path) {
    std::error_code ignored;
    return fs::is_directory(path, ignored);
}

bool holds(const fs::path& folder, const char* name) {
    std::error_code ignored;
    return fs::exists(folder / name, ignored);
}

// The names of the files with one of these endings, sorted.
std::vector<fs::path> files_ending(const fs::path& folder, std::initializer_list<const char*> endings) {
    std::vector<fs::path> found;
    std::error_code error;
    for (fs::directory_iterator entry(folder, error); !error && entry != fs::directory_iterator();
         entry.increment(error)) {
        if (std::ranges::find(endings, entry->path().extension().string()) != endings.end())
            found.push_back(entry->path());
    }
    std::ranges::sort(found);
    return found;
}

// The places of a file's boxes by their tensors; null if each tensor is whole.
Json offsets_in(const SafetensorsReader& reader, const fs::path& file) {
    const auto found = reader.metadata().find(sharding_key);
    if (found == reader.metadata().end()) return nullptr;
    Json places = Json::parse(found->second, nullptr, false);
    if (!places.is_object()) user_error("{}: its {} is not a JSON object", file.string(), sharding_key);
    return places;
}

void take_offsets(StoredBox& box, const Json& places, const std::string& name, const fs::path& file) {
    const auto place = places.find(name);
    const auto fault = [&](const char* what) {
        user_error("{}: tensor {}: {} in {}", file.string(), in_quotes(name), what, sharding_key);
    };
    if (place == places.end() || !place->is_object() || !place->contains(offsets_key))
        fault("it has no place");
    const Json& offsets = (*place)[offsets_key];
    if (!offsets.is_array() || std::ssize(offsets) != box.shape.dimensions()) fault("its place is no place");
    for (int i = 0; i < box.shape.dimensions(); ++i) {
        const Json& offset = offsets[static_cast<std::size_t>(i)];
        std::int64_t end = 0;
        if (!offset.is_number_unsigned() || offset.get<std::uint64_t>() > INT64_MAX ||
            __builtin_add_overflow(offset.get<std::int64_t>(), box.shape[i], &end))
            fault("its place is no place");
        box.offsets[static_cast<std::size_t>(i)] = offset.get<std::int64_t>();
    }
}

bool overlap(const StoredBox& a, const StoredBox& b) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(a.shape.dimensions()); ++i) {
        const auto dimension = static_cast<int>(i);
        if (a.offsets[i] >= b.offsets[i] + b.shape[dimension] ||
            b.offsets[i] >= a.offsets[i] + a.shape[dimension])
            return false;
    }
    return a.shape.elements() > 0 && b.shape.elements() > 0;
}

Json sizes_of(const Shape& shape) {
    Json sizes = Json::array();
    for (int i = 0; i < shape.dimensions(); ++i) sizes.push_back(shape[i]);
    return sizes;
}

Shape shape_of(const Json& sizes) {
    Shape shape;
    for (const Json& size : sizes) shape = shape + Shape{size.get<std::int64_t>()};
    return shape;
}

}  // namespace

void require_checksum(const StoredFile& file, std::uint64_t begin, std::span<const std::byte> bytes) {
    BlockChecksums checksum;
    checksum.add(bytes);
    if (checksum.finish().front() != file.checksums.at(begin / checksum_block))
        user_error(
            "the checkpoint is damaged: {} does not have its checksum, in the block at byte {}; take an "
            "older one",
            file.path.string(), begin);
}

StoredTensors::StoredTensors(const fs::path& named)
    : is_folder(is_folder_at(named)), is_model(is_model_folder(named)), named_(named) {}

void StoredTensors::add(const fs::path& file, std::vector<std::string> checksums, const std::string& prefix) {
    const SafetensorsReader reader(file);
    const Json places = offsets_in(reader, file);
    for (const SafetensorsEntry& entry : reader.entries()) {
        StoredBox box{.file = files_.size(),
                      .position = reader.position(entry.name),
                      .dtype = entry.dtype,
                      .shape = entry.shape};
        if (!places.is_null()) take_offsets(box, places, entry.name, file);
        StoredTensor& tensor = tensors_[prefix + entry.name];
        if (!tensor.boxes.empty() && places.is_null())
            user_error("{}: {} is in two files; remove it from one of them", named_.string(),
                       in_quotes(entry.name));
        if (tensor.boxes.empty()) tensor.shape = entry.shape;
        if (tensor.shape.dimensions() != entry.shape.dimensions())
            user_error("{}: tensor {} has {} in this file, and {} in {}", file.string(),
                       in_quotes(entry.name), plural(entry.shape.dimensions(), "dimension"),
                       tensor.shape.dimensions(), files_[tensor.boxes.front().file].path.string());
        for (int i = 0; i < entry.shape.dimensions(); ++i) {
            const std::int64_t end = box.offsets[static_cast<std::size_t>(i)] + entry.shape[i];
            tensor.shape.resize(i, std::max(tensor.shape[i], end));
        }
        tensor.boxes.push_back(std::move(box));
    }
    files_.push_back({file, reader.file_bytes(), std::move(checksums)});
}

void StoredTensors::require_whole() {
    for (auto& [name, tensor] : tensors_) {
        std::ranges::stable_sort(tensor.boxes, {}, [](const StoredBox& box) { return box.offsets[0]; });
        std::int64_t elements = 0;
        std::vector<const StoredBox*> open;  // those that reach the row of the next one
        for (const StoredBox& box : tensor.boxes) {
            elements = saturated_sum(elements, box.shape.elements());
            std::erase_if(open, [&](const StoredBox* other) {
                return other->shape.dimensions() > 0 && other->offsets[0] + other->shape[0] <= box.offsets[0];
            });
            for (const StoredBox* other : open) {
                if (overlap(box, *other))
                    user_error("{}: the parts of tensor {} in {} and {} overlap; get the folder again",
                               named_.string(), in_quotes(name), files_[other->file].path.filename().string(),
                               files_[box.file].path.filename().string());
            }
            open.push_back(&box);
        }
        if (elements != tensor.shape.elements())
            user_error(
                "{}: of tensor {}, with the shape {}, there are only {}; give the folder with all its files",
                named_.string(), in_quotes(name), to_string(tensor.shape), plural(elements, "element"));
    }
}

std::string StoredTensors::to_bytes() const {
    Json json = {{"named", named_.string()}, {"is_folder", is_folder},
                 {"is_model", is_model},     {"note", note},
                 {"files", Json::array()},   {"tensors", Json::object()}};
    for (const StoredFile& file : files_)
        json["files"].push_back({file.path.string(), file.bytes, file.checksums});
    for (const auto& [name, tensor] : tensors_) {
        Json boxes = Json::array();
        for (const StoredBox& box : tensor.boxes)
            boxes.push_back({box.file, box.position, box.dtype, sizes_of(box.shape), box.offsets});
        json["tensors"][name] = {sizes_of(tensor.shape), std::move(boxes)};
    }
    const std::vector<std::uint8_t> bytes = Json::to_msgpack(json);
    return {bytes.begin(), bytes.end()};
}

StoredTensors StoredTensors::from_bytes(const std::string& bytes) {
    const Json json = Json::from_msgpack(bytes.begin(), bytes.end());
    StoredTensors stored(json.at("named").get<std::string>());
    stored.is_folder = json.at("is_folder");
    stored.is_model = json.at("is_model");
    stored.note = json.at("note");
    for (const Json& file : json.at("files"))
        stored.files_.push_back({file[0].get<std::string>(), file[1], file[2]});
    for (const auto& [name, value] : json.at("tensors").items()) {
        StoredTensor& tensor = stored.tensors_[name];
        tensor.shape = shape_of(value[0]);
        for (const Json& box : value[1])
            tensor.boxes.push_back({box[0], box[1], box[2], shape_of(box[3]), box[4]});
    }
    return stored;
}

bool is_model_folder(const fs::path& path) {
    return holds(path, "config.json") && !holds(path, "manifest.json") && !holds(path, "run.json");
}

bool is_sharded_folder(const fs::path& path) {
    if (holds(path, "manifest.json") || holds(path, "run.json") || holds(path, one_file) ||
        holds(path, index_file))
        return false;
    const std::vector<fs::path> files = files_ending(path, {extension});
    return !files.empty() && SafetensorsReader(files.front()).metadata().contains(sharding_key);
}

namespace {

void add_shards(StoredTensors& stored, const fs::path& folder, const fs::path& index) {
    const auto json = Json::parse(read_file(index), nullptr, false);
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
    for (const std::string& name : names) stored.add(folder / name);
    for (const auto& [tensor, file] : map->items()) {
        if (!stored.tensors().contains(tensor))
            user_error("{}: {} has no tensor {}; get the folder again", index.string(),
                       file.get<std::string>(), in_quotes(tensor));
    }
}

}  // namespace

StoredTensors find_tensors(const fs::path& path) {
    StoredTensors stored(path);
    if (!stored.is_folder) {
        stored.add(path);
    } else if (holds(path, one_file)) {  // as in Hugging Face's library, also beside an index
        stored.add(path / one_file);
        if (holds(path, index_file))
            stored.note = fmt::format("{} has {}, so its {} and the files that it names are not read",
                                      path.string(), one_file, index_file);
    } else if (holds(path, index_file)) {
        add_shards(stored, path, path / index_file);
    } else if (is_sharded_folder(path)) {
        for (const fs::path& file : files_ending(path, {extension})) stored.add(file);
    } else if (!files_ending(path, {".bin", ".pt", ".pth"}).empty()) {
        user_error(
            "{} has its weights in files of torch.save only; load it with transformers, and write it with "
            "save_pretrained, which makes safetensors files",
            path.string());
    } else {
        user_error("{} has neither {} nor {}; give a folder with weights", path.string(), one_file,
                   index_file);
    }
    stored.require_whole();
    return stored;
}

}  // namespace llmc
