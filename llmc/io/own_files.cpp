#include "llmc/io/own_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "llmc/core/error.h"
#include "llmc/io/files.h"
#include "llmc/io/safetensors.h"
#include "llmc/io/stored_tensors.h"

namespace llmc {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// Elements that are read at a time.
constexpr std::int64_t piece = std::int64_t{1} << 20;

// The n-th box of a tensor goes into the n-th file.
void add_boxes(std::vector<OwnFile>& files, std::string_view prefix, int rank,
               std::span<const OwnBox> boxes) {
    for (std::size_t n = 0; n < boxes.size(); ++n) {
        if (n == files.size())
            files.push_back({fmt::format("{}{:05}-{}.safetensors", prefix, rank, n + 1), {}});
        files[n].boxes.push_back(boxes[n]);
    }
}

std::vector<OwnBox> boxes_of(const ModelPlaces& places, int unit, std::size_t entry, int rank,
                             const OwnBox& like) {
    const ElementRange written = places.written(unit, entry, rank);
    if (written.size() == 0) return {};
    const int tensor_rank = rank % places.mesh().tensor;
    std::int64_t begin = places.layout(unit, tensor_rank).entries()[entry].offset + written.begin -
                         places.updated(unit, rank).begin;
    std::vector<OwnBox> boxes;
    for (const Box& box : places.part(unit, entry, tensor_rank).boxes(written)) {
        OwnBox& made = boxes.emplace_back(like);
        made.box = box;
        made.run = {begin, begin + box.elements()};
        begin = made.run.end;
    }
    return boxes;
}

// Writes the elements of a box with these rows and columns, column by column, from those row by row.
template <class Write>
void write_transposed(std::span<const std::byte> values, const Box& box, DType dtype, const Write& write) {
    with_dtype(dtype, [&]<class T>(T) {
        const auto* from = reinterpret_cast<const T*>(values.data());
        const std::int64_t at_once = std::max<std::int64_t>(1, piece / box.rows);
        std::vector<T> columns;
        for (std::int64_t first = 0; first < box.columns; first += at_once) {
            const std::int64_t end = std::min(first + at_once, box.columns);
            columns.resize(static_cast<std::size_t>((end - first) * box.rows));
            for (std::int64_t i = 0; i < box.rows; ++i)
                for (std::int64_t j = first; j < end; ++j)
                    columns[static_cast<std::size_t>((j - first) * box.rows + i)] = from[i * box.columns + j];
            write(std::as_bytes(std::span(columns)));
        }
    });
}

std::string header_of(const OwnFile& file) {
    std::vector<SafetensorsEntry> entries;
    Json offsets = Json::object();
    for (const OwnBox& of : file.boxes) {
        const Box box = box_in_file(of.spec, of.box);
        const std::string dtype(traits_of(of.dtype).file_name);
        if (of.spec.is_vector) {
            entries.push_back({of.name, dtype, {box.rows}});
            offsets[of.name][offsets_key] = {box.row};
        } else {
            entries.push_back({of.name, dtype, {box.rows, box.columns}});
            offsets[of.name][offsets_key] = {box.row, box.column};
        }
    }
    return safetensors_header(entries,
                              {{sharding_version_key, sharding_version}, {sharding_key, offsets.dump()}});
}

Json write_own_file(const fs::path& path, const OwnFile& file, const ReadKept& read) {
    OutputFile output(path);
    BlockChecksums checksums;
    std::uint64_t bytes = 0;
    const auto write = [&](std::span<const std::byte> data) {
        output.write(data);
        checksums.add(data);
        bytes += data.size();
    };
    const std::string header = header_of(file);
    write(std::as_bytes(std::span(header)));
    std::vector<std::byte> values;
    for (const OwnBox& of : file.boxes) {
        // What is transposed is read as a whole.
        const bool turns = of.spec.transposed_in_files && of.box.rows > 1 && of.box.columns > 1;
        const std::int64_t step = turns ? of.run.size() : piece;
        for (std::int64_t begin = of.run.begin; begin < of.run.end; begin += step) {
            const ElementRange run{begin, std::min(begin + step, of.run.end)};
            values.resize(static_cast<std::size_t>(run.size()) * size_of(of.dtype));
            read(of.unit, of.kept, run, values);
            turns ? write_transposed(values, of.box, of.dtype, write) : write(values);
        }
    }
    output.sync();
    output.close();
    return {{"bytes", bytes}, {"blocks", checksums.finish()}};
}

}  // namespace

std::string state_name(const std::string& tensor, const StateTensor& state) {
    return fmt::format("optim.state.{}.{}", tensor, state.name);
}

std::string checksums_name(int rank) { return fmt::format("{}{:05}.json", checksums_prefix, rank); }

std::vector<OwnFile> plan_own_files(const ParameterStore& store, const ModelPlaces& places, int rank) {
    std::vector<OwnFile> weights, state;
    for (int unit = 0; unit < places.units(); ++unit) {
        if (store.is_frozen(unit)) continue;
        for (std::size_t entry = 0; entry < places.tensors(unit); ++entry) {
            const ParamSpec& spec = places.spec(unit, entry);
            const std::string name =
                places.outline().files.name_in_file(places.layout(unit, 0).full_name(spec));
            const auto boxes = [&](const std::string& of_kind, Kept kept) {
                return boxes_of(places, unit, entry, rank,
                                {of_kind, unit, kept, store.dtype_in_files(unit, kept), spec, {}, {}});
            };
            add_boxes(weights, weights_prefix, rank, boxes(name, Kept::master));
            const std::span<const StateTensor> tensors = store.optimizer_of(unit, spec).state;
            for (std::size_t i = 0; i < tensors.size(); ++i)
                add_boxes(state, state_files_prefix, rank,
                          boxes(state_name(name, tensors[i]), kept_state(i)));
        }
    }
    weights.insert(weights.end(), state.begin(), state.end());
    return weights;
}

SealedFile write_own_files(const fs::path& folder, int rank, std::span<const OwnFile> files,
                           const ReadKept& read) {
    if (files.empty()) return {};
    Json list = Json::object();
    for (const OwnFile& file : files) list[file.name] = write_own_file(folder / file.name, file, read);
    const std::string text = Json{{"block_bytes", checksum_block}, {"files", list}}.dump(1) + "\n";
    write_file(folder / checksums_name(rank), text);
    SealedFile sealed{.bytes = text.size(), .checksum = {}};
    std::ranges::copy(checksum_of_text(text), sealed.checksum.begin());
    return sealed;
}

}  // namespace llmc
