#include "llmc/io/export_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>

#include "llmc/core/dtype.h"
#include "llmc/core/error.h"
#include "llmc/io/adapter_files.h"
#include "llmc/io/files.h"
#include "llmc/io/model_files.h"
#include "llmc/io/safetensors.h"

namespace llmc {

namespace fs = std::filesystem;

namespace {

// ---- dtypes of files

// The bytes of a tensor in a file.
std::span<const std::byte> converted(const std::string& name, std::span<const float> values, DType dtype,
                                     std::vector<std::uint16_t>& memory) {
    if (dtype == DType::fp32) return std::as_bytes(values);
    memory.resize(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
        memory[i] = dtype == DType::bf16 ? to_bfloat16(values[i]).bits : to_float16(values[i]).bits;
        if (dtype == DType::fp16 && std::isinf(to_float(float16{memory[i]})))
            user_error("{} has {}, and fp16 ends at 65504; give --export-dtype bf16", name, values[i]);
    }
    return std::as_bytes(std::span(memory));
}

// ---- shards

struct Shard {
    std::string name;
    std::vector<SafetensorsEntry> tensors;
};

std::vector<Shard> shards_of(const std::vector<SafetensorsEntry>& tensors, std::uint64_t most_bytes) {
    std::vector<Shard> shards;
    std::uint64_t bytes = 0;
    for (const SafetensorsEntry& tensor : tensors) {
        if (shards.empty() || bytes + tensor.bytes() > most_bytes) {
            shards.emplace_back();
            bytes = 0;
        }
        shards.back().tensors.push_back(tensor);
        bytes += tensor.bytes();
    }
    for (std::size_t i = 0; i < shards.size(); ++i)
        shards[i].name = shards.size() == 1
                             ? "model.safetensors"
                             : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    return shards;
}

void write_index(const fs::path& folder, const std::vector<Shard>& shards) {
    std::uint64_t bytes = 0;
    std::map<std::string, std::string> files;
    for (const Shard& shard : shards) {
        for (const SafetensorsEntry& tensor : shard.tensors) {
            bytes += tensor.bytes();
            files[tensor.name] = shard.name;
        }
    }
    const nlohmann::ordered_json index = {{"metadata", {{"total_size", bytes}}}, {"weight_map", files}};
    write_file(folder / "model.safetensors.index.json", index.dump(2) + "\n");
}

// Writes all weights into the shards, one after the other, in this folder.
void write_shards(const fs::path& folder, const std::vector<Shard>& shards, const ParameterStore& store,
                  UnitTransfer& transfer, const Collected& what, DType dtype,
                  const std::map<std::string, std::string>& metadata, bool sync) {
    std::size_t shard = 0, written = 0;
    std::unique_ptr<SafetensorsWriter> writer;
    std::vector<std::uint16_t> memory;
    collect_weights(store, transfer, what, [&](const std::string& name, std::span<const float> values) {
        if (!writer)
            writer = std::make_unique<SafetensorsWriter>(folder / shards[shard].name, shards[shard].tensors,
                                                         metadata);
        writer->append(name, converted(name, values, dtype, memory));
        if (++written < shards[shard].tensors.size()) return;
        writer->finish(sync);
        writer.reset();
        written = 0;
        ++shard;
    });
}

// The folder's name until it is whole.
fs::path partial(const fs::path& folder) {
    const fs::path plain = plain_path(folder);
    return plain.parent_path() / fmt::format(".{}.partial", plain.filename().string());
}

}  // namespace

bool is_folder_name(const fs::path& name) { return !name.empty() && name.extension() != ".safetensors"; }

void require_new_folder(const fs::path& folder) {
    std::error_code error;
    const fs::file_status status = fs::status(folder, error);
    if (fs::exists(status)) {
        if (!fs::is_directory(status))
            user_error("{} is {}, but a name without .safetensors means a folder; give another name",
                       folder.string(), fs::is_regular_file(status) ? "a file" : "not a regular file");
        if (!fs::is_empty(folder, error)) user_error("{} is not empty; give a new folder", folder.string());
    }
    require_writable_directory(link_target(folder));
}

void save_file(const fs::path& file, const ParameterStore& store, UnitTransfer& transfer,
               const Collected& what, const std::string& dtype) {
    const Shard all{file.filename().string(),
                    weights_table(store, transfer, traits_of(dtype_named(dtype)).file_name.data())};
    write_shards(file.parent_path(), {all}, store, transfer, what, dtype_named(dtype), {}, false);
}

void save_folder(const fs::path& folder, const ParameterStore& store, UnitTransfer& transfer,
                 const ExportedFolder& exported) {
    if (!transfer.is_root()) {
        return collect_weights(store, transfer, exported.what, {});
    }
    const fs::path made = partial(folder);
    std::error_code ignored;
    fs::remove_all(made, ignored);  // of an earlier start that was killed
    try {
        make_directory(made);
        const bool are_adapters = exported.what.tensors == Tensors::adapters;
        std::vector<SafetensorsEntry> table = weights_table(
            store, transfer, traits_of(dtype_named(exported.dtype)).file_name.data(), exported.what.tensors);
        const std::vector<Shard> shards = are_adapters
                                              ? std::vector{Shard{adapter_weights_file, std::move(table)}}
                                              : shards_of(table, exported.shard_bytes);
        write_shards(made, shards, store, transfer, exported.what, dtype_named(exported.dtype),
                     exported.metadata, true);
        if (shards.size() > 1) write_index(made, shards);
        write_file(made / (are_adapters ? adapter_config_file : "config.json"), exported.config);
        write_tokenizer_files(made, exported.tokenizer);
        sync_directory(made);
        replace_directory(made, plain_path(folder));
    } catch (const fs::filesystem_error& fault) {
        fs::remove_all(made, ignored);
        user_error("cannot write {}: {}", folder.string(), fault.code().message());
    } catch (...) {
        fs::remove_all(made, ignored);
        throw;
    }
}

}  // namespace llmc
