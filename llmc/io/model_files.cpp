#include "llmc/io/model_files.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/safetensors.h"

namespace llmc {

namespace {

using Flat = Tensor UnitBuffers::*;

// One kind of tensor in a file: which of a unit's flat buffers, and what is added to the tensor's name.
struct Kind {
    Flat flat;
    const char* suffix;
};
constexpr Kind weights{&UnitBuffers::master, ""};
constexpr Kind first_moment{&UnitBuffers::m, ".exp_avg"};
constexpr Kind second_moment{&UnitBuffers::v, ".exp_avg_sq"};

constexpr std::string_view prefix = "transformer.";
constexpr std::string_view head_name = "lm_head.weight";

Shape file_shape(const ParamSpec& spec) {
    const std::int64_t columns = spec.shape.last();
    const std::int64_t rows = spec.shape.elements() / columns;
    if (spec.is_bias) return {spec.shape.elements()};
    return spec.transposed_in_files ? Shape{columns, rows} : spec.shape;
}

// to (columns, rows) = the transpose of from (rows, columns).
void transpose(std::span<float> to, std::span<const float> from, std::int64_t rows, std::int64_t columns) {
#pragma omp parallel for
    for (std::int64_t j = 0; j < columns; ++j) {
        for (std::int64_t i = 0; i < rows; ++i) {
            to[static_cast<std::size_t>(j * rows + i)] = from[static_cast<std::size_t>(i * columns + j)];
        }
    }
}

template <class Number>
std::span<Number> tensor_of(std::span<Number> flat, const UnitLayout::Entry& entry) {
    return flat.subspan(static_cast<std::size_t>(entry.offset),
                        static_cast<std::size_t>(entry.spec.shape.elements()));
}

std::vector<SafetensorsEntry> table_of(std::span<const UnitLayout> units, std::span<const Kind> kinds) {
    std::vector<SafetensorsEntry> table;
    for (const Kind& kind : kinds) {
        for (const UnitLayout& unit : units) {
            for (const UnitLayout::Entry& entry : unit.entries())
                table.push_back({unit.full_name(entry.spec) + kind.suffix, "F32", file_shape(entry.spec)});
        }
    }
    return table;
}

// Each kind's units, one after the other, to f(kind, unit, flat) on the root.
template <class F>
void collect_all(const ParameterStore& store, UnitTransfer& transfer, std::span<const Kind> kinds, F&& f) {
    for (const Kind& kind : kinds) {
        for (int unit = 0; unit < store.units(); ++unit) {
            const std::span<const float> flat = transfer.collect(unit, kind.flat);
            if (transfer.is_root()) f(kind, unit, flat);
        }
    }
}

void save(const std::filesystem::path& file, const ParameterStore& store, UnitTransfer& transfer,
          std::span<const Kind> kinds, bool sync) {
    if (!transfer.is_root()) return collect_all(store, transfer, kinds, [](auto&&...) {});
    SafetensorsWriter writer(file, table_of(transfer.units(), kinds));
    std::vector<float> transposed;
    collect_all(store, transfer, kinds, [&](const Kind& kind, int unit, std::span<const float> flat) {
        const UnitLayout& layout = transfer.units()[static_cast<std::size_t>(unit)];
        for (const UnitLayout::Entry& entry : layout.entries()) {
            std::span<const float> values = tensor_of(flat, entry);
            if (entry.spec.transposed_in_files) {
                const std::int64_t columns = entry.spec.shape.last();
                transposed.resize(values.size());
                transpose(transposed, values, entry.spec.shape.elements() / columns, columns);
                values = transposed;
            }
            writer.append(layout.full_name(entry.spec) + kind.suffix, std::as_bytes(values));
        }
    });
    writer.finish(sync);
}

// The name under which a file holds a tensor, with or without the prefix.
std::string name_in(const SafetensorsReader& reader, const std::string& name) {
    const std::string prefixed = std::string(prefix) + name;
    return reader.contains(prefixed) ? prefixed : name;
}

// A weight that is not finite would make every loss nan.
void check_finite(const std::filesystem::path& file, const std::string& name, std::span<const float> values,
                  const Shape& shape) {
    const auto found = std::ranges::find_if(values, [](float x) { return !std::isfinite(x); });
    if (found == values.end()) return;
    std::int64_t rest = found - values.begin();
    std::string index;
    for (int i = shape.dimensions() - 1; i >= 0; --i) {
        index = fmt::format("{}{}{}", rest % shape[i], index.empty() ? "" : ", ", index);
        rest /= shape[i];
    }
    user_error("{}: {} is not finite ({} at ({})): no step from step 1 on would have a finite loss",
               file.string(), name, *found, index);
}

void check_shape(const std::filesystem::path& file, const SafetensorsReader& reader, const std::string& name,
                 const Shape& expected) {
    const Shape found = reader.entry(name).shape;
    if (found == expected) return;
    user_error("{}: {} has the shape {}, this model needs {}; give the sizes of the file's model",
               file.string(), name, to_string(found), to_string(expected));
}

// Reads a unit's tensors of a kind into its flat buffer.
void read_unit(const std::filesystem::path& file, const SafetensorsReader& reader, const UnitLayout& layout,
               const Kind& kind, std::span<float> flat) {
    std::vector<float> transposed;
    for (const UnitLayout::Entry& entry : layout.entries()) {
        const std::string name = name_in(reader, layout.full_name(entry.spec) + kind.suffix);
        const Shape expected = file_shape(entry.spec);
        check_shape(file, reader, name, expected);
        const std::span<float> values = tensor_of(flat, entry);
        if (entry.spec.transposed_in_files) {
            transposed.resize(values.size());
            reader.read(name, std::span<float>(transposed));
            check_finite(file, name, transposed, expected);
            transpose(values, transposed, expected[0], expected[1]);
        } else {
            reader.read(name, values);
            check_finite(file, name, values, expected);
        }
    }
}

// Hands each unit's part that this rank updates to f(unit, values). `reader`: the root's.
template <class F>
void load(const std::filesystem::path& file, const SafetensorsReader* reader, const ParameterStore& store,
          UnitTransfer& transfer, const Kind& kind, F&& f) {
    for (int unit = 0; unit < store.units(); ++unit) {
        const std::span<float> whole = transfer.whole(unit);
        if (reader) read_unit(file, *reader, transfer.units()[static_cast<std::size_t>(unit)], kind, whole);
        const std::span<const float> own = transfer.distribute(unit);
        if (store.has(unit)) f(unit, own);
    }
}

std::unique_ptr<const SafetensorsReader> open_on_root(const std::filesystem::path& file,
                                                      const UnitTransfer& transfer) {
    return transfer.is_root() ? std::make_unique<const SafetensorsReader>(file) : nullptr;
}

// GPT-2's files carry the causal mask of each block, which is no weight.
bool is_mask(std::string_view name) {
    return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
}

// A head of its own would be lost silently: only one that is the embedding is accepted.
void check_tied_head(const std::filesystem::path& file, const SafetensorsReader& reader) {
    if (!reader.contains(head_name)) return;
    const SafetensorsEntry& head = reader.entry(head_name);
    const std::string wte = name_in(reader, "wte.weight");
    if (head.shape == reader.entry(wte).shape) {
        std::vector<float> a(static_cast<std::size_t>(head.shape.elements())), b(a.size());
        reader.read(head.name, std::span<float>(a));
        reader.read(wte, std::span<float>(b));
        if (a == b) return;
    }
    user_error("{}: lm_head.weight differs from {}; this program trains GPT-2, whose head is the embedding",
               file.string(), wte);
}

void check_names(const std::filesystem::path& file, const SafetensorsReader& reader,
                 std::span<const UnitLayout> units) {
    std::set<std::string> known = {std::string(head_name)};
    for (const UnitLayout& unit : units) {
        for (const UnitLayout::Entry& entry : unit.entries()) known.insert(unit.full_name(entry.spec));
    }
    for (const SafetensorsEntry& entry : reader.entries()) {
        std::string_view name = entry.name;
        if (name.starts_with(prefix)) name.remove_prefix(prefix.size());
        if (is_mask(name) || known.contains(std::string(name))) continue;
        user_error("{}: {} is no tensor of this model of {}; give the sizes of the file's model",
                   file.string(), in_quotes(entry.name), plural(std::ssize(units) - 3, "block"));
    }
}

}  // namespace

void save_tensors(const std::filesystem::path& file, const ParameterStore& store, UnitTransfer& transfer,
                  Flat flat, bool sync) {
    const Kind kind{flat, ""};
    save(file, store, transfer, std::span(&kind, 1), sync);
}

void check_weights(const std::filesystem::path& file, std::span<const UnitLayout> units) {
    const SafetensorsReader reader(file);
    check_names(file, reader, units);
    for (const UnitLayout& unit : units) {
        for (const UnitLayout::Entry& entry : unit.entries())
            check_shape(file, reader, name_in(reader, unit.full_name(entry.spec)), file_shape(entry.spec));
    }
}

void load_weights(const std::filesystem::path& file, ParameterStore& store, UnitTransfer& transfer) {
    const auto reader = open_on_root(file, transfer);
    if (reader) {
        check_names(file, *reader, transfer.units());
        check_tied_head(file, *reader);
    }
    load(file, reader.get(), store, transfer, weights,
         [&](int unit, std::span<const float> values) { store.set_weights(unit, values); });
}

void save_moments(const std::filesystem::path& file, const ParameterStore& store, UnitTransfer& transfer,
                  bool sync) {
    const Kind moments[] = {first_moment, second_moment};
    save(file, store, transfer, moments, sync);
}

void load_moments(const std::filesystem::path& file, Device& device, const ParameterStore& store,
                  UnitTransfer& transfer) {
    const auto reader = open_on_root(file, transfer);
    for (const Kind& kind : {first_moment, second_moment}) {
        load(file, reader.get(), store, transfer, kind, [&](int unit, std::span<const float> values) {
            device.upload(store.buffers(unit).*kind.flat, values.data());
        });
    }
}

}  // namespace llmc
